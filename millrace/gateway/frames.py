"""Streamed answers as whole frames. A frame that breaks off is never forwarded, so a resumed stream repeats nothing.

Token ids come in comment lines before the frame that they belong to: `: tokens 17 4`, `: tokens/1 17` for choice 1, and
`: end 1` where a choice ends. Lines of JSON have the field `millrace_tokens` instead. They are taken out here, kept as
they came, and read only when a stream is resumed.
"""

from __future__ import annotations

import base64
import re
import struct

MAX_FRAME_BYTES = 16 << 20
HEADER_CHARS = 4096
"""Ids of a long answer are sent in several headers, each at most this long."""
_MARK = re.compile(rb"^: (?:tokens(?:/(\d+))? ([0-9 ]*)|end (\d+))\n", re.MULTILINE)
_FIRST_CHOICE = b": tokens "
_IDS_AT = len(_FIRST_CHOICE)
_FIELD = re.compile(rb'^\{"millrace_tokens":\[([0-9,]*)\],', re.MULTILINE)
_ERROR = re.compile(rb'^(?:event: (?:error|response\.failed)$|data: \{"error":|\{"error":)', re.MULTILINE)
_PASSING = (b"engine_unavailable", b"overloaded_error", b"shut down before")
_DATA = re.compile(rb"^(?:data:|event:|\{)", re.MULTILINE)
_ID = re.compile(rb'"id": ?"[^"\\]{1,128}"')


class BrokenFrame(Exception):
    """What a replica sent is not a stream of frames."""


class FrameReader:
    """Cuts the bytes of a stream after whole frames, and takes the token ids out of them."""

    def __init__(self, *, is_lines: bool) -> None:
        """`is_lines`: a frame is a line of JSON."""
        self._end = b"\n" if is_lines else b"\n\n"
        self._is_lines = is_lines
        self._rest = b""
        self._marks: list[tuple[bytes, bytes, bytes]] = []
        """Choice, ids, and the choice that ended, as they came."""

    def feed(self, data: bytes) -> bytes:
        """The whole frames so far, as the client gets them. `data` is whole chunks of HTTP: the frames of a token share
        one, so that none of them is sent without the others."""
        if self._rest:
            data = self._rest + data
        if data.endswith(self._end):
            frames, self._rest = data, b""
        else:
            end = data.rfind(self._end) + len(self._end)
            if end < len(self._end):
                if len(data) > MAX_FRAME_BYTES:
                    raise BrokenFrame("a frame is too long")
                self._rest = data
                return b""
            frames, self._rest = data[:end], data[end:]
        if self._is_lines:
            if b"millrace_tokens" not in frames:
                return frames
            self._marks += [(b"", ids.replace(b",", b" "), b"") for ids in _FIELD.findall(frames)]
            return _FIELD.sub(b"{", frames)
        if b"\n: " not in frames:
            if frames.startswith(_FIRST_CHOICE):  # Most often: one token of one choice.
                ids, _, frames = frames[_IDS_AT:].partition(b"\n")
                self._marks.append((b"", ids, b""))
                return frames
            if not frames.startswith(b": "):
                return frames
        self._marks += _MARK.findall(frames)
        return _MARK.sub(b"", frames)

    def start_again(self) -> None:
        """The stream goes on from another replica: drop the part of a frame that broke off."""
        self._rest = b""

    @property
    def is_between_frames(self) -> bool:
        return not self._rest

    @property
    def has_tokens(self) -> bool:
        return bool(self._marks)

    def received(self, num_choices: int) -> list[tuple[list[int], bool]]:
        """By choice, the ids that the client has, and whether the choice has ended."""
        ids: list[list[int]] = [[] for _ in range(num_choices)]
        ended = [False] * num_choices
        for choice, words, end in self._marks:
            if end:
                ended[min(int(end), num_choices - 1)] = True
            else:
                ids[min(int(choice or 0), num_choices - 1)] += map(int, words.split())
        return list(zip(ids, ended, strict=True))


def has_data(frames: bytes) -> bool:
    """False for comments alone, such as signs of life."""
    return frames.startswith(b"data:") or _DATA.search(frames) is not None


def before_passing_error(frames: bytes) -> bytes | None:
    """If a replica ended the stream because it goes away: the frames before its error. Other errors are the answer."""
    found = _ERROR.search(frames)
    if found is None or not any(word in frames[found.start() :] for word in _PASSING):
        return None
    return frames[: found.start()]


def encode_received(received: list[tuple[list[int], bool]]) -> list[str]:
    """The values of the header that names what the client has; a long one is several."""
    parts = (
        base64.b64encode(struct.pack(f"<{len(ids)}I", *ids)).decode() + "!" * has_ended for ids, has_ended in received
    )
    text = ",".join(parts)
    return [text[start : start + HEADER_CHARS] for start in range(0, len(text), HEADER_CHARS)] or [""]


def decode_tokens(text: str) -> list[int]:
    data = base64.b64decode(text.removesuffix("!"), validate=True)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


class AnswerId:
    """Keeps the id of an answer that goes on elsewhere: the client sees the first one throughout."""

    def __init__(self) -> None:
        self._first = b""
        self._other = b""
        self._is_resumed = False
        self.is_kept = False
        """True while frames have the first id by themselves, so that `rewrite` would change nothing."""

    def rewrite(self, frames: bytes) -> bytes:
        if not self._first:
            found = _ID.search(frames)
            self._first = found[0] if found else b""
            self.is_kept = bool(found) and not self._is_resumed
        elif self._is_resumed:
            found = None if self._other else _ID.search(frames)
            self._other = found[0] if found else self._other
            if self._other:
                return frames.replace(self._other, self._first)
        return frames

    def resumed(self) -> None:
        self._is_resumed, self._other, self.is_kept = True, b"", False
