"""Frames of streams: cut whole, with the ids of their tokens taken out."""

from __future__ import annotations

import pytest

from millrace.gateway.frames import (
    HEADER_CHARS,
    AnswerId,
    FrameReader,
    before_passing_error,
    decode_tokens,
    encode_received,
)

STREAM = (
    b': tokens 1 2\ndata: {"a":1}\n\n: The answer follows\n\n'
    b': tokens/1 7\nevent: x\ndata: {"b":2}\n\n: end 1\ndata: {"c":3}\n\ndata: [DONE]\n\n'
)
PLAIN = b'data: {"a":1}\n\n: The answer follows\n\nevent: x\ndata: {"b":2}\n\ndata: {"c":3}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 1000])
def test_ids_are_taken_out_however_the_bytes_come(size: int) -> None:
    reader = FrameReader(is_lines=False)
    parts = [reader.feed(STREAM[at : at + size]) for at in range(0, len(STREAM), size)]
    assert b"".join(parts) == PLAIN
    assert all(not part or part.endswith(b"\n\n") for part in parts)
    assert reader.received(2) == [([1, 2], False), ([7], True)]


def test_ids_of_a_frame_that_broke_off_do_not_count() -> None:
    reader = FrameReader(is_lines=False)
    assert reader.feed(b': tokens 1\ndata: {}\n\n: tokens 2\ndata: {"unfin') == b"data: {}\n\n"
    assert not reader.is_between_frames
    reader.start_again()
    assert reader.feed(b": tokens 3\ndata: {}\n\n") == b"data: {}\n\n"
    assert reader.received(1) == [([1, 3], False)]


def test_lines_have_a_field() -> None:
    reader = FrameReader(is_lines=True)
    assert reader.feed(b'{"millrace_tokens":[4,5],"a":1}\n{"b":2}\n{"c"') == b'{"a":1}\n{"b":2}\n'
    assert reader.received(1) == [([4, 5], False)]


def test_header_of_a_long_answer_is_several() -> None:
    ids = list(range(5000))
    parts = encode_received([(ids, False)])
    assert len(parts) > 1
    assert max(map(len, parts)) <= HEADER_CHARS
    assert decode_tokens("".join(parts)) == ids
    assert encode_received([([], False)]) == [""]
    assert encode_received([([1], True), ([], False)])[0].count(",") == 1


def test_replica_that_goes_away_is_no_answer() -> None:
    before = b'data: {"choices":[]}\n\n'
    gone = b'data: {"error":{"message":"x","code":"engine_unavailable"}}\n\n'
    assert before_passing_error(before + gone) == before
    assert before_passing_error(b'event: error\ndata: {"code":"engine_unavailable"}\n\n') == b""
    assert before_passing_error(b'data: {"error":{"code":"context_length_exceeded"}}\n\n') is None
    assert before_passing_error(b'data: {"text":"data: {\\"error\\": engine_unavailable"}\n\n') is None


def test_answer_keeps_its_id() -> None:
    names = AnswerId()
    assert names.rewrite(b'data: {"id":"one"}\n\n') == b'data: {"id":"one"}\n\n'
    names.resumed()
    assert names.rewrite(b'data: {"id":"two"}\n\n') == b'data: {"id":"one"}\n\n'
