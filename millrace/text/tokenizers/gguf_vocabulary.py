"""The tokenizer part of GGUF metadata, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.errors import ModelError

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The validated tokenizer part of the metadata."""

    where: str
    architecture: str
    tokens: list[str]
    types: Sequence[int]
    metadata: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def token_id(self, key: str, default: int | None = None) -> int | None:
        value = self.get(key, default)
        return int(value) if value is not None and 0 <= int(value) < len(self.tokens) else None

    @property
    def is_gemma(self) -> bool:
        return self.architecture.startswith("gemma")


def vocabulary_of(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(
            f"{where} has no vocabulary (tokenizer.ggml.tokens); convert the model again with its vocabulary."
        )
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    for key, values in (("token_type", types), ("scores", metadata.get("tokenizer.ggml.scores"))):
        if values is not None and len(values) != len(tokens):
            raise ModelError(
                f"{where}: tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens;"
                " the file is damaged, download it again."
            )
    return Vocabulary(where, str(metadata.get("general.architecture", "")), tokens, types, metadata)
