"""Cuts the bytes of a connection into the head and the body of one answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from multidict import CIMultiDict

MAX_HEAD_BYTES = 1 << 16
MAX_CHUNK_BYTES = 64 << 20
_MAX_SIZE_LINE = 256
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: |$)")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
_NO_BODY = frozenset({204, 304})


class BrokenAnswer(ConnectionError):
    """What came is not an answer in HTTP/1.1, or it broke off."""


@dataclass(slots=True)
class Head:
    status: int
    headers: CIMultiDict[str]
    keeps_open: bool


class AnswerParser:
    """Gives the body in pieces. Of a chunked one only whole chunks: what a replica writes at once stays together."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._rest = bytearray()
        self._needed = 0
        """Bytes that `_rest` must have before it can be cut further."""
        self._head_bytes = 0
        """Of heads before the last one."""
        self._left: int | None = None
        """Bytes of the body still to come; None if chunks or the end of the connection say where it ends."""
        self._is_chunked = False
        self._in_trailer = False
        self.head: Head | None = None
        self.has_ended = False

    @property
    def can_reuse(self) -> bool:
        """Whether the connection can take another request."""
        return self.has_ended and self.head is not None and self.head.keeps_open and not self._rest

    def feed(self, data: bytes) -> bytes:
        if self.head is None:
            self._rest += data
            if not self._read_head():
                return b""
            data = bytes(self._rest)
            self._rest.clear()
        if self.has_ended:
            self._rest += data
            return b""
        if self._is_chunked:
            return self._chunks(data)
        if self._left is None:
            return data
        body = data[: self._left]
        self._rest += data[self._left :]
        self._left -= len(body)
        self.has_ended = not self._left
        return body

    def close(self) -> None:
        """The connection has ended: so has a body whose length nobody said."""
        if self.head is not None and not self._is_chunked and self._left is None:
            self.has_ended = True
        if not self.has_ended:
            raise BrokenAnswer("the answer broke off" if self.head is not None else "the connection closed, no answer")

    # ── the head ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _read_head(self) -> bool:
        while True:
            end = self._rest.find(b"\r\n\r\n")
            if self._head_bytes + (len(self._rest) if end < 0 else end) > MAX_HEAD_BYTES:
                raise BrokenAnswer("the head of the answer is too long")
            if end < 0:
                return False
            lines = bytes(self._rest[:end]).split(b"\r\n")
            del self._rest[: end + 4]
            self._head_bytes += end + 4
            found = _STATUS.match(lines[0])
            if found is None:
                raise BrokenAnswer("the answer is not HTTP/1.1")
            status = int(found[2])
            if status >= 200:
                break
            if status == 101:
                raise BrokenAnswer("the answer changes the protocol")
        headers = _headers(lines[1:])
        options = {word.strip().lower() for value in headers.getall("Connection", []) for word in value.split(",")}
        keeps_open = "close" not in options if found[1] == b"1" else "keep-alive" in options
        self.head = Head(status, headers, keeps_open)
        self._find_body(status, headers)
        return True

    def _find_body(self, status: int, headers: CIMultiDict[str]) -> None:
        lengths = set(headers.getall("Content-Length", []))
        coding = ",".join(headers.getall("Transfer-Encoding", [])).strip().lower()
        if len(lengths) > 1 or (lengths and coding) or coding not in ("", "chunked"):
            raise BrokenAnswer("the answer does not say clearly where it ends")
        length = lengths.pop() if lengths else None
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 16):
            raise BrokenAnswer("the length of the answer is not a number")
        if self._method == "HEAD" or status in _NO_BODY:
            self.has_ended = True
        elif coding:
            self._is_chunked = True
        elif length is not None:
            self._left = int(length)
            self.has_ended = not self._left

    # ── chunks ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _chunks(self, new: bytes) -> bytes:
        """The bodies of the whole chunks so far."""
        rest = self._rest
        if not (rest or self._in_trailer):  # Most often a chunk comes by itself.
            start = new.find(b"\r\n") + 2
            end = len(new) - 2
            if 2 < start < end == start + _chunk_size(new[: start - 2]) and new.endswith(b"\r\n"):
                return new[start:end]
        if rest:
            rest += new
            if len(rest) < self._needed:
                return b""
            new = bytes(rest)
            rest.clear()
            self._needed = 0
        at, bodies = 0, []
        while not self._in_trailer:
            line_end = new.find(b"\r\n", at)
            if line_end < 0:
                if len(new) - at > _MAX_SIZE_LINE:
                    raise BrokenAnswer("a chunk does not say its length")
                break
            size = _chunk_size(new[at:line_end])
            if not size:
                at, self._in_trailer = line_end + 2, True
                break
            start = line_end + 2
            end = start + size
            if len(new) < end + 2:
                self._needed = end + 2 - at
                break
            if new[end : end + 2] != b"\r\n":
                raise BrokenAnswer("a chunk is longer than it says")
            bodies.append(new[start:end])
            at = end + 2
        rest += new[at:]
        if self._in_trailer:
            self._skip_trailer()
        return bodies[0] if len(bodies) == 1 else b"".join(bodies)

    def _skip_trailer(self) -> None:
        while (end := self._rest.find(b"\r\n")) >= 0:
            del self._rest[: end + 2]
            if not end:
                self.has_ended = True
                return
        if len(self._rest) > MAX_HEAD_BYTES:
            raise BrokenAnswer("the end of the answer is too long")


@lru_cache(maxsize=1024)
def _chunk_size(line: bytes) -> int:
    number = line.partition(b";")[0].strip() if b";" in line or b" " in line else line
    size = int(number, 16) if _SIZE.fullmatch(number) else -1
    if not 0 <= size <= MAX_CHUNK_BYTES:
        raise BrokenAnswer("a chunk does not say its length, or is too long")
    return size


def _headers(lines: list[bytes]) -> CIMultiDict[str]:
    headers: CIMultiDict[str] = CIMultiDict()
    for line in lines:
        name, colon, value = line.decode("utf-8", "surrogateescape").partition(":")
        if not colon or not _NAME.fullmatch(name) or "\n" in value or "\r" in value or "\0" in value:
            raise BrokenAnswer("the answer has a broken header")
        headers.add(name, value.strip(" \t"))
    return headers
