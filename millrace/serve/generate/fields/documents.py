"""Parts of messages that may be reused wherever they stood before."""

from __future__ import annotations

from typing import Annotated, Literal

from millrace.serve.generate.generation import Generation
from millrace.serve.http.schema import Strict, described
from millrace.text.document_spans import MarkedText


class DocumentCache(Strict, kw_only=True):
    """The part's keys and values may be those of the same text elsewhere, so that it is not computed again. The answer
    is then an approximation."""

    type: Literal["document"]
    recompute: Annotated[
        float | None,
        described("Share of the part, from its beginning, that is computed in its place; default 0.15.", minimum=0),
    ] = None

    def marked(self, text: str) -> MarkedText:
        return MarkedText(text, self.recompute)


def documents_note(generation: Generation) -> str:
    """What an answer's headers say if parts of its prompt may be reused from other places."""
    spans = sum(len(prompt.documents.spans) for prompt in generation.prompts if prompt.documents is not None)
    marked = (
        "1 part of the prompt is marked as a document"
        if spans == 1
        else f"{spans} parts of the prompt are marked as documents"
    )
    return f"approximate: {marked}" if spans else ""
