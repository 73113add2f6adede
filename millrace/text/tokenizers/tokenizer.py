"""The `Tokenizer` class: text to token ids and back, with the same ids as the model's original tokenizer.

A `Tokenizer` is immutable and thread-safe. The `tokenizers` library does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer as Backend

from millrace.errors import BadRequest
from millrace.text.tokenizers.token_table import TokenTable, table_for

_MAX_ID = 2**31 - 1

END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
)
"""Control tokens that end a turn in every family that has them, even if the model's files do not list them."""

MarkerId = Callable[[str], int | None]
"""As `Tokenizer.marker_id`."""


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """Ids around and between two texts that a model reads together."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    has_types: bool
    """True if tokens of the second text have a type of their own."""

    @property
    def num_added(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """The ids of both, and the index from which the second type holds; 0 if there is one type only."""
        start = [*self.before, *first, *self.between]
        return [*start, *second, *self.after], len(start) if self.has_types else 0


NO_PAIR = PairTemplate((), (), (), has_types=False)


class Tokenizer:
    """One model's vocabulary, special tokens and chat templates."""

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int = 0,
        bos_token_id: int | None = None,
        end_token_ids: tuple[int, ...] = (),
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        pair: PairTemplate = NO_PAIR,
        special_tokens: Mapping[str, str] | None = None,
        special_ids: frozenset[int] = frozenset(),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`special_ids` adds to the ids that the backend marks as special. `prefix_ids` and `suffix_ids` go before
        and after an encoded text, such as BOS."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._prefix = list(prefix_ids)
        self._suffix = list(suffix_ids)
        self.prefix_ids = prefix_ids
        self.suffix_ids = suffix_ids
        self.pair = pair
        self.chat_templates: dict[str, str] = dict(chat_templates or {})
        """Jinja sources by name ("default", "tool_use", …)."""
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """Highest id plus one. Some ids below it may have no token."""
        self.bos_token_id = bos_token_id
        self.end_token_ids = end_token_ids
        """Every token that ends a turn; the model's EOS token is first."""
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        """Special tokens by role (bos_token, eos_token, …), as chat templates read them."""
        self.special_ids = frozenset(index for index, token in added.items() if token.special) | special_ids
        """Ids that decoding hides by default."""
        written = (index for index, token in added.items() if token.content[:1] == "<" and token.content[-1:] == ">")
        self.marker_ids = self.special_ids.union(end_token_ids, written)
        """Ids that grammars match by id and never as text: special and end tokens, and added tokens that are written
        <…>. Many models do not flag <tool_call> and </think> as special, though they are no text either."""

    @cached_property
    def table(self) -> TokenTable:
        """Bytes and text of each id, for the detokenizer."""
        return table_for(self.backend, self.vocab_size, self.special_ids)

    def to_json(self) -> str:
        """The content of a tokenizer.json, without the prefix and suffix tokens."""
        return self.backend.to_str()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of the text. A special token that is written out in the text becomes that token.

        `add_special` adds the prefix and suffix tokens, such as BOS. A rendered chat already contains them.
        """
        return self.encode_batch([text], add_special=add_special)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """As `encode`, for several texts in parallel. Releases the GIL."""
        try:
            encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_unicode(texts) or error from error
        if not add_special or not (self._prefix or self._suffix):
            return [one.ids for one in encoded]
        return [self._prefix + one.ids + self._suffix for one in encoded]

    def cut(self, ids: list[int], room: int) -> list[int]:
        """An encoded text without the end of what is too long; its suffix tokens stay."""
        num_after = len(self._suffix)
        return ids if len(ids) <= room else [*ids[: max(0, room - num_after)], *self._suffix]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids, as Hugging Face decodes them. Ids without a token are skipped."""
        if len(ids) and not (min(ids) >= 0 and max(ids) <= _MAX_ID):
            wrong = next(token_id for token_id in ids if not 0 <= token_id <= _MAX_ID)
            raise BadRequest(f"{wrong} is not a token id; ids run from 0 to {self.vocab_size - 1}.")
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes, which may be part of a character; b"" for an id without a token."""
        return self.table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text, with U+FFFD for incomplete characters."""
        return self.table.bytes_of(token_id).decode("utf-8", "replace")

    def tokens(self) -> dict[int, str]:
        """Every token by its id, as the vocabulary spells it."""
        return {index: token for token, index in self.backend.get_vocab(with_added_tokens=True).items()}

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it, or None."""
        return self.backend.token_to_id(token)

    def marker_id(self, text: str) -> int | None:
        """Id of the marker (`marker_ids`) with this text; None if grammars match it as text."""
        token_id = self.token_id(text)
        return token_id if token_id in self.marker_ids else None


def _not_unicode(texts: Sequence[str]) -> BadRequest | None:
    """The error for a text with a lone surrogate, which UTF-8 cannot encode."""
    for text in texts:
        for place, char in enumerate(text):
            if "\ud800" <= char <= "\udfff":
                return BadRequest(
                    f"The text is not valid Unicode: character {place} is the lone surrogate U+{ord(char):04X}."
                    " Send text that is valid UTF-8."
                )
    return None
