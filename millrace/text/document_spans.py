"""Documents inside a prompt: tokenised on their own, so that a text has the same tokens wherever it stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import BadRequest
from millrace.params.keeping import MAX_DOCUMENTS, Documents, DocumentSpan
from millrace.text.tokenizers.tokenizer import Tokenizer

DEFAULT_RECOMPUTE = 0.15


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A part of a message whose keys and values may be those of the same text elsewhere."""

    text: str
    recompute: float | None = None
    """Share of its tokens, from the first on, that is computed in its place; None: the default."""

    @property
    def share(self) -> float:
        return DEFAULT_RECOMPUTE if self.recompute is None else self.recompute


def check_documents(documents: Sequence[MarkedText]) -> None:
    if len(documents) > MAX_DOCUMENTS:
        raise BadRequest(
            f"{len(documents)} parts are marked as documents; at most {MAX_DOCUMENTS} are allowed.", param="prompt"
        )
    for document in documents:
        if not 0.0 <= document.share <= 1.0:
            raise BadRequest(f"recompute is {document.share:g}; it must be between 0 and 1.", param="recompute")


def encode_with_documents(
    tokenizer: Tokenizer, text: str, documents: Sequence[MarkedText]
) -> tuple[list[int], Documents]:
    """The token ids of a rendered conversation, and where its documents are. One that the template has rewritten is not
    found, and is text like any other."""
    token_ids: list[int] = []
    spans: list[DocumentSpan] = []
    end = 0
    for document in documents:
        wanted = document.text.strip()
        at = text.find(wanted, end) if wanted else -1
        if at < 0:
            continue
        token_ids += tokenizer.encode(text[end:at], add_special=False)
        own = tokenizer.encode(wanted, add_special=False)
        first = len(token_ids) + math.ceil(document.share * len(own))
        spans.append(DocumentSpan(len(token_ids), len(token_ids) + len(own), first))
        token_ids += own
        end = at + len(wanted)
    token_ids += tokenizer.encode(text[end:], add_special=False)
    if spans and tokenizer.decode(token_ids, skip_special=False) != text:
        raise BadRequest(
            "The tokenizer of this model changes a text that is split at documents, so parts of messages cannot be"
            " marked as documents; remove 'cache' from them.",
            param="cache",
            code="unsupported_parameter",
        )
    return token_ids, Documents(tuple(spans))
