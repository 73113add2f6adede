"""Tokenizing copes with very long words, does not block other threads, and is thread-safe."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.served import wait_until
from text import corpus

from millrace.params.sampling import SamplingParams
from millrace.text.text_stream import TextStream
from millrace.text.tokenizers.tokenizer import Tokenizer

MEGABYTE = 1_000_000


@pytest.mark.parametrize("unit", ["a", "xq", " ", "\n", "!", "中文", "👍", "0", "é"])
def test_very_long_word(default_tokenizer: Tokenizer, unit: str) -> None:
    """A second at most; work that grows with the square of the length would take hours."""
    text = unit * (300_000 // len(unit))
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


def test_very_long_word_for_sentence_piece(sentence_piece: Tokenizer) -> None:
    text = "the" * 100_000
    assert sentence_piece.decode(sentence_piece.encode(text)) == text


def test_other_threads_run_while_a_long_text_is_tokenized(default_tokenizer: Tokenizer) -> None:
    """This thread wakes several times while the other is in one and the same call."""
    text = (" ".join(corpus.SENTENCES) * 1000)[: MEGABYTE // 2]
    calls = [0]
    is_seen = threading.Event()

    def encode() -> None:
        while not is_seen.is_set():
            calls[0] += 1
            default_tokenizer.encode(text)

    def wakes_within_a_call() -> bool:
        seen = []
        for _ in range(5):
            time.sleep(0.001)
            seen.append(calls[0])
        return len(set(seen)) == 1 and seen[0] > 0

    worker = threading.Thread(target=encode)
    worker.start()
    try:
        wait_until(wakes_within_a_call, "this thread runs while the other tokenizes")
    finally:
        is_seen.set()
        worker.join()


def test_threads_share_a_tokenizer(default_tokenizer: Tokenizer) -> None:
    texts = corpus.pieces(seed=4)
    expected = [default_tokenizer.encode(text) for text in texts]

    def work(start: int) -> bool:
        for place in range(start, start + len(texts)):
            text, ids = texts[place % len(texts)], expected[place % len(texts)]
            stream = TextStream(default_tokenizer, SamplingParams(skip_special_tokens=False))
            shown = "".join(map(stream.push, ids)) + stream.finish()
            if default_tokenizer.encode(text) != ids or shown != default_tokenizer.decode(ids, skip_special=False):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(0, 400, 50)))


def test_pushing_a_token_is_cheap(default_tokenizer: Tokenizer) -> None:
    """One function call for a token of whole characters, and no call inside it."""
    ids = default_tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200)
    push = TextStream(default_tokenizer, SamplingParams()).push
    for token_id in ids:  # The table of texts is filled as tokens appear.
        push(token_id)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event.endswith("call") else None)
    for token_id in ids:
        push(token_id)
    sys.setprofile(None)
    assert calls.count("call") == len(ids)
    assert calls.count("c_call") == 1, "this test's own call of setprofile"
