"""Tokenizing takes linear time, does not block other threads, and is thread-safe."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from text import corpus

from millrace.params import SamplingParams
from millrace.text.text_stream import TextStream
from millrace.text.tokenizers.tokenizer import Tokenizer

MEGABYTE = 1_000_000


@pytest.mark.parametrize("unit", ["a", "xq", " ", "\n", "!", "中文", "👍", "0", "é"])
def test_very_long_word_is_tokenized_in_bounded_time(default_tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (300_000 // len(unit))
    start = time.perf_counter()
    ids = default_tokenizer.encode(text)
    assert time.perf_counter() - start < 20  # about 0.3 s on an idle machine
    assert default_tokenizer.decode(ids) == text


def test_very_long_word_for_sentence_piece(sentence_piece: Tokenizer) -> None:
    text = "the" * 100_000
    assert sentence_piece.decode(sentence_piece.encode(text)) == text


def test_other_threads_run_while_a_long_text_is_tokenized(default_tokenizer: Tokenizer) -> None:
    text = (" ".join(corpus.SENTENCES) * 1000)[: 2 * MEGABYTE]
    done = threading.Event()

    def encode() -> None:
        default_tokenizer.encode(text)
        done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    ticks = 0
    while not done.wait(0.005):
        ticks += 1
    worker.join()
    assert ticks > 10


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
    ids = default_tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200)
    best = float("inf")
    for _ in range(5):
        push = TextStream(default_tokenizer, SamplingParams()).push
        start = time.perf_counter()
        for token_id in ids:
            push(token_id)
        best = min(best, (time.perf_counter() - start) / len(ids))
    assert best < 2e-6  # about 0.1 µs on an idle machine
