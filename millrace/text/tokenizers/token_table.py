"""Tables of the bytes and text of each token, for each kind of decoder.

A table gives the text of a token in the middle of a stream, or says that it is only part of a character. Entries are
computed on first use, so building a table costs nothing and a lookup is one list index. Two threads may compute the
same entry; both write the same value.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from typing import Any

from tokenizers import Tokenizer as Backend

from millrace.errors import ModelError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_of_char() -> dict[int, int]:
    """Alphabet of byte-level vocabularies: visible Latin-1 characters are their own bytes, others map above 255."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {byte: byte for byte in visible} | {256 + place: byte for place, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_of_char()
CHAR_OF_BYTE = {byte: chr(char) for char, byte in BYTE_OF_CHAR.items()}
_BYTE_CHARS = frozenset(CHAR_OF_BYTE.values())

_CLEANED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""What a WordPiece decoder that cleans up replaces in each token."""


class TokenTable(ABC):
    """Base of the tables. `pending` holds the bytes of an incomplete character."""

    opens_plainly = True
    """True if the first text of a stream needs no special treatment."""

    def __init__(self, backend: Backend, vocab_size: int, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._bytes: list[bytes | None] = [None] * vocab_size
        self._texts: list[str | None] = [None] * vocab_size
        self._texts_skipping = self._texts.copy()
        for token_id in special_ids:
            if token_id < vocab_size:
                self._texts_skipping[token_id] = ""

    def texts(self, *, skip_special: bool) -> list[str | None]:
        """Text of each token inside a stream; "" if it has none; None if not computed yet or not whole characters."""
        return self._texts_skipping if skip_special else self._texts

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; b"" for an id without a token."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        data = self._bytes[token_id]
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = self._bytes[token_id] = b"" if token is None else self._encode(token)
        return data

    def advance(self, pending: bytes, token_id: int, *, skip_special: bool) -> tuple[str, bytes]:
        """The text that is final after this token, and the bytes still pending."""
        texts = self.texts(skip_special=skip_special)
        text = texts[token_id] if token_id < len(texts) else ""
        if text is None:
            text = self._whole_text(token_id)
            texts[token_id] = text
        if text == "":
            return "", pending
        if text is not None and not pending:
            return text, b""
        return self._join(pending, token_id, text)

    @abstractmethod
    def _encode(self, token: str) -> bytes: ...

    @abstractmethod
    def _whole_text(self, token_id: int) -> str | None: ...

    @abstractmethod
    def _join(self, pending: bytes, token_id: int, text: str | None) -> tuple[str, bytes]:
        """As `advance`, for a token of incomplete characters or while bytes are pending."""

    @abstractmethod
    def close(self, pending: bytes) -> str:
        """Text of the pending bytes at the end of the stream."""

    def open(self, text: str) -> str:
        """The first text of a stream, as the decoder would write it."""
        return text


class ByteLevelTable(TokenTable):
    """Tokens are bytes; the text is all bytes decoded as UTF-8, regardless of token boundaries."""

    def _encode(self, token: str) -> bytes:
        if _BYTE_CHARS.issuperset(token):
            return token.translate(BYTE_OF_CHAR).encode("latin-1")
        return token.encode("utf-8")

    def _whole_text(self, token_id: int) -> str | None:
        try:
            return self.bytes_of(token_id).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def _join(self, pending: bytes, token_id: int, text: str | None) -> tuple[str, bytes]:
        data = pending + self.bytes_of(token_id)
        known, used = codecs.utf_8_decode(data, "replace", False)
        return known, data[used:]

    def close(self, pending: bytes) -> str:
        return pending.decode("utf-8", "replace")


class PieceTable(TokenTable):
    """Tokens are text with marks for spaces; characters outside the vocabulary are runs of byte tokens.

    A run is text only if all of it is valid UTF-8; otherwise each byte becomes U+FFFD. A run therefore stays pending
    until another token ends it.
    """

    def __init__(
        self,
        backend: Backend,
        vocab_size: int,
        special_ids: frozenset[int],
        *,
        replacements: tuple[tuple[str, str], ...],
        byte_fallback: bool,
        strip_first: tuple[str, int],
    ) -> None:
        super().__init__(backend, vocab_size, special_ids)
        self._replacements = replacements
        self._byte_fallback = byte_fallback
        self._strip_char, self._strip_count = strip_first
        self.opens_plainly = not self._strip_count

    def _encode(self, token: str) -> bytes:
        token = self._replaced(token)
        return bytes((int(token[3:5], 16),)) if self._is_byte(token) else token.encode("utf-8")

    def _replaced(self, token: str) -> str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token

    def _is_byte(self, replaced: str) -> bool:
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(replaced) is not None

    def _whole_text(self, token_id: int) -> str | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        text = self._replaced(token)
        return None if self._is_byte(text) else text

    def _join(self, pending: bytes, token_id: int, text: str | None) -> tuple[str, bytes]:
        if text is None:
            return "", pending + self.bytes_of(token_id)
        return self.close(pending) + text, b""

    def close(self, pending: bytes) -> str:
        try:
            return pending.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(pending)

    def open(self, text: str) -> str:
        for _ in range(self._strip_count):
            text = text.removeprefix(self._strip_char)
        return text


class WordTable(TokenTable):
    """For tokenizers without a decoder: tokens are words, joined by spaces."""

    opens_plainly = False

    def _encode(self, token: str) -> bytes:
        return b" " + token.encode("utf-8")

    def _whole_text(self, token_id: int) -> str | None:
        return self.bytes_of(token_id).decode("utf-8")

    def _join(self, pending: bytes, token_id: int, text: str | None) -> tuple[str, bytes]:
        return text or "", pending

    def close(self, pending: bytes) -> str:
        return ""

    def open(self, text: str) -> str:
        return text.removeprefix(" ")


class WordPieceTable(WordTable):
    """BERT's words: a token that continues a word has a prefix, mostly ##; others follow a space."""

    def __init__(
        self, backend: Backend, vocab_size: int, special_ids: frozenset[int], *, prefix: str, cleans: bool
    ) -> None:
        super().__init__(backend, vocab_size, special_ids)
        self._prefix = prefix
        self._cleans = cleans

    def _encode(self, token: str) -> bytes:
        text = token.removeprefix(self._prefix) if token.startswith(self._prefix) else f" {token}"
        for old, new in _CLEANED if self._cleans else ():
            text = text.replace(old, new)
        return text.encode("utf-8")


def table_for(backend: Backend, vocab_size: int, special_ids: frozenset[int]) -> TokenTable:
    """The table that decodes like the backend's decoder."""
    decoder = backend.decoder
    if decoder is None:
        return WordTable(backend, vocab_size, special_ids)
    rule = json.loads(decoder.__getstate__())
    if rule["type"] == "ByteLevel":
        return ByteLevelTable(backend, vocab_size, special_ids)
    if rule["type"] == "WordPiece":
        cleans = bool(rule.get("cleanup", True))
        return WordPieceTable(backend, vocab_size, special_ids, prefix=rule.get("prefix", "##"), cleans=cleans)
    steps = rule["decoders"] if rule["type"] == "Sequence" else [rule]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelTable(backend, vocab_size, special_ids)
    return _piece_table(backend, vocab_size, special_ids, steps, kinds)


def _piece_table(
    backend: Backend, vocab_size: int, special_ids: frozenset[int], steps: list[dict[str, Any]], kinds: list[str]
) -> PieceTable:
    num_replaced = next((place for place, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    rest, strip = kinds[num_replaced:], (" ", 0)
    if rest and rest[-1] == "Strip" and "Fuse" in rest and not steps[-1]["stop"]:
        strip = (steps[-1]["content"], int(steps[-1]["start"]))
        rest = rest[:-1]
    patterns = [step["pattern"].get("String") for step in steps[:num_replaced]]
    if rest not in ([], ["Fuse"], ["ByteFallback"], ["ByteFallback", "Fuse"]) or None in patterns:
        raise ModelError(
            f"The tokenizer's decoder is {' + '.join(kinds)}, which is not supported."
            " Supported: ByteLevel, WordPiece, and Replace + ByteFallback + Fuse + Strip."
        )
    return PieceTable(
        backend,
        vocab_size,
        special_ids,
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in steps[:num_replaced]),
        byte_fallback="ByteFallback" in rest,
        strip_first=strip,
    )
