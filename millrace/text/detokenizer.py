"""Token ids to text, one at a time: a table lookup for whole characters, bytes held back for broken ones."""

from __future__ import annotations

from millrace.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """One stream. What `push` returned so far, plus `flush`, equals decoding all the ids at once, for any ids.

    No text is returned before it is certain: the bytes of an unfinished character wait for the next token, and end as
    U+FFFD if it does not complete them.
    """

    __slots__ = ("_opened", "_pending", "_plain", "_skip_special", "_table", "_texts")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._table = tokenizer.table
        self._texts = self._table.texts(skip_special=skip_special)
        self._skip_special = skip_special
        self._pending = b""
        self._opened = self._table.opens_plainly
        self._plain = self._opened
        """Nothing is pending and the first text has been seen: the table's text is the answer."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often its own, "" while a character is unfinished."""
        if self._plain:
            try:
                text = self._texts[token_id]
            except IndexError:  # a row of the model that the vocabulary does not name
                return ""
            if text is not None:
                return text
        return self._push_slowly(token_id)

    def _push_slowly(self, token_id: int) -> str:
        text, self._pending = self._table.advance(self._pending, token_id, skip_special=self._skip_special)
        if text and not self._opened:
            text = self._table.open(text)
            self._opened = True
        self._plain = self._opened and not self._pending
        return text

    def flush(self) -> str:
        """The text of what is still held back, when nothing more will come."""
        text, self._pending = self._table.close(self._pending), b""
        if text and not self._opened:
            text = self._table.open(text)
            self._opened = True
        self._plain = self._opened
        return text
