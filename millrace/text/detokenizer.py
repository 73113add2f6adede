"""Streaming detokenizer: token ids to text, one id at a time.

A token of whole characters costs one table lookup. The bytes of an incomplete character are held back.
"""

from __future__ import annotations

from millrace.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """State of one stream. For any ids, the texts of all `push` calls and of `flush` together equal `Tokenizer.decode`.

    Text is returned once later tokens cannot change it: the bytes of an incomplete character wait for the next token,
    and become U+FFFD if that does not complete them.
    """

    __slots__ = ("_opened", "_pending", "_plain", "_skip_special", "_table", "_texts")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._table = tokenizer.table
        self._texts = self._table.texts(skip_special=skip_special)
        self._skip_special = skip_special
        self._pending = b""
        self._opened = self._table.opens_plainly
        self._plain = self._opened
        """True if no bytes are pending and the first text was returned: the table's text is the result."""

    def push(self, token_id: int) -> str:
        """Text that this token completes: usually its own, "" while a character is incomplete."""
        if self._plain:
            try:
                text = self._texts[token_id]
            except IndexError:  # The embedding has more rows than the vocabulary has tokens.
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
        """Text of the bytes still held back, at the end of the stream."""
        text, self._pending = self._table.close(self._pending), b""
        if text and not self._opened:
            text = self._table.open(text)
            self._opened = True
        self._plain = self._opened
        return text
