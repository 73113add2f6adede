"""The engine's grammars: compiled in the background, several rows at once, an error ends only its own request."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from helpers.served import wait_until

pytest.importorskip("llguidance")

from millrace.engine import grammars as grammars_module
from millrace.engine.grammars import ALL_TOKENS, COMPILE_LIMIT_S, FIRST_LIMIT_S, NEVER, Failure, Grammars
from millrace.link.messages import NewRequest, decode_to_engine
from millrace.params.grammar import Grammar
from millrace.params.sampling import SamplingParams
from millrace.text.grammar import compiler as compiler_module
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.stand_in import build_stand_in

END = 299
VOCAB = 300
NUM_WORDS = 10
OBJECT = Grammar("json_object")
YES = Grammar("json_schema", '{"const": "yes"}')


def environment() -> GrammarEnvironment:
    """Tokens are bytes."""
    return GrammarEnvironment(build_stand_in({"vocab_size": VOCAB, "eos_token_id": END}), VOCAB, 2)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(environment)
    yield made
    made.shut_down()


def open_all(grammars: Grammars, wanted: dict[int, Grammar]) -> None:
    for request_id, grammar in wanted.items():
        grammars.open(request_id, grammar, "", 0.0)
    ready: set[int] = set()

    def all_ready() -> bool:
        ready.update(grammars.take_ready(0.0))
        return ready == set(wanted)

    wait_until(all_ready, "compiled grammars")


def allowed(grammars: Grammars, request_ids: list[int]) -> list[set[int]]:
    out = np.full((len(request_ids), NUM_WORDS), 5, np.uint32)
    grammars.fill(request_ids, out)
    bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_a_request_becomes_ready_without_blocking() -> None:
    go_on = threading.Event()

    def load() -> GrammarEnvironment:
        assert go_on.wait(60)
        return environment()

    grammars = Grammars(load)
    grammars.open(1, OBJECT, "", 0.0)
    assert grammars.take_ready(0.0) == []
    assert len(grammars) == 1
    go_on.set()
    wait_until(lambda: grammars.take_ready(0.0) == [1], "the compiled grammar")
    assert grammars.take_ready(0.0) == []
    assert grammars.take_failed() == []
    grammars.shut_down()


def test_several_rows_advance_each_on_their_own(grammars: Grammars) -> None:
    open_all(grammars, {1: OBJECT, 2: YES, 3: OBJECT})
    assert allowed(grammars, [1, 2, 3]) == [{ord("{")}, {ord('"')}, {ord("{")}]
    grammars.consume([3, 2, 7], [ord("{"), ord('"'), 9])  # 7 has no grammar
    assert allowed(grammars, [3, 2, 1]) == [{ord('"'), ord("}")}, {ord("y")}, {ord("{")}]
    grammars.consume([2, 2, 3, 2], [*b"y", *b"e", *b"}", *b"s"])  # with drafts a step gives several tokens
    assert allowed(grammars, [3, 2]) == [{END}, {ord('"')}]
    assert grammars.take_failed() == []
    assert grammars.counters.masks == 8
    assert grammars.counters.mask_seconds > 0


def test_an_answer_that_must_go_on_ends_only_where_nothing_else_may_follow(grammars: Grammars) -> None:
    numbers, longer = Grammar("regex", "1{2,5}"), Grammar("regex", "1{2,5}")
    grammars.open(1, numbers, "", 0.0, NEVER)
    grammars.open(2, longer, "", 0.0, 4)
    grammars.open(3, numbers, "", 0.0)
    ready: list[int] = []
    wait_until(lambda: len(ready.extend(grammars.take_ready(0.0)) or ready) == 3, "compiled grammars")
    one = ord("1")
    seen = []
    for _ in range(5):
        seen.append(allowed(grammars, [1, 2, 3]))
        grammars.consume([1, 2, 3], [one] * 3)
    assert seen == [
        [{one}] * 3,
        [{one}] * 3,
        [{one}, {one}, {one, END}],
        [{one}, {one}, {one, END}],
        [{one}, {one, END}, {one, END}],
    ]
    assert allowed(grammars, [1, 2, 3]) == [{END}] * 3
    out = np.zeros((4, NUM_WORDS), np.uint32)
    grammars.close(1)
    grammars.open(4, numbers, "", 0.0, 3)
    wait_until(lambda: grammars.take_ready(0.0) == [4], "the compiled grammar")
    grammars.fill([4], out, [[one, one, one]])
    ends = [bool(row[END // 32] >> END % 32 & 1) for row in out]
    assert ends == [False, False, False, True], "after three drafts it may end"


def test_requests_share_a_compiled_grammar_but_no_state(grammars: Grammars) -> None:
    open_all(grammars, dict.fromkeys(range(20), OBJECT))
    counters = grammars.counters
    assert (counters.compiled, counters.cache_hits) == (1, 19)
    assert counters.compile_seconds > 0
    grammars.consume([5], [ord("{")])
    assert allowed(grammars, [4, 5]) == [{ord("{")}, {ord('"'), ord("}")}]


def test_a_token_outside_the_grammar_fails_its_request_only(grammars: Grammars) -> None:
    open_all(grammars, {1: OBJECT, 2: OBJECT})
    grammars.consume([1, 2], [ord("x"), ord("{")])
    (failure,) = grammars.take_failed()
    assert failure.request_id == 1
    assert failure.message.endswith(".")
    assert grammars.take_failed() == []
    out = np.zeros((2, NUM_WORDS), np.uint32)
    grammars.fill([1, 2], out)
    assert (out[0] == ALL_TOKENS).all()  # something must be drawn, and is discarded
    assert 0 < np.unpackbits(out[1].view(np.uint8)).sum() < 5
    grammars.consume([1], [ord("y")])
    assert grammars.take_failed() == []
    assert grammars.counters.failures == 1


def test_an_error_while_masks_are_computed_fails_its_request_only(grammars: Grammars) -> None:
    open_all(grammars, {1: OBJECT, 2: OBJECT, 3: OBJECT})
    broken = grammars._matchers[2].inner  # Nothing public reaches a limit of llguidance.
    broken.consume_token(ord("x"))
    assert broken.is_error()
    rows = allowed(grammars, [1, 2, 3])
    assert rows[0] == rows[2] == {ord("{")}
    assert len(rows[1]) == 32 * NUM_WORDS
    assert [failure.request_id for failure in grammars.take_failed()] == [2]
    assert allowed(grammars, [1, 3]) == [{ord("{")}] * 2


def test_a_grammar_that_cannot_be_used_fails(grammars: Grammars) -> None:
    grammars.open(1, Grammar("json_schema", '{"not": {}}'), "", 0.0)
    open_all(grammars, {2: OBJECT})
    wait_until(lambda: grammars.take_ready(0.0) == [] and len(grammars) == 1, "the failure")
    assert grammars.take_failed() == [Failure(1, "The schema uses 'not', which is not supported; remove it.")]
    assert len(grammars) == 1


def test_a_vocabulary_that_cannot_be_loaded_is_tried_again() -> None:
    attempts = []

    def load() -> GrammarEnvironment:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no such file")
        return environment()

    grammars = Grammars(load)
    grammars.open(1, OBJECT, "", 0.0)
    wait_until(lambda: grammars.take_ready(0.0) == [] and not len(grammars), "the failure")
    (failure,) = grammars.take_failed()
    assert "no such file" in failure.message
    open_all(grammars, {2: OBJECT})
    grammars.shut_down()


def test_compiling_has_a_time_limit() -> None:
    go_on = threading.Event()

    def load() -> GrammarEnvironment:
        assert go_on.wait(60)
        return environment()

    grammars = Grammars(load)
    grammars.open(1, OBJECT, "", 100.0)
    grammars.open(2, YES, "", 120.0)
    assert grammars.take_ready(100.0 + COMPILE_LIMIT_S + 1) == []
    assert grammars.take_failed() == [], "loading the vocabulary is not compiling"
    assert grammars.take_ready(100.0 + FIRST_LIMIT_S + 1) == []
    assert [(failure.request_id, failure.reason) for failure in grammars.take_failed()] == [(1, "error")]
    go_on.set()
    wait_until(lambda: grammars.take_ready(120.0) == [2], "the compiled grammar")
    grammars.shut_down()


def test_a_full_queue_fails_the_request(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_PENDING", 0)
    grammars.open(1, OBJECT, "", 0.0)
    assert [failure.request_id for failure in grammars.take_failed()] == [1]
    assert len(grammars) == 0


def test_a_grammar_that_stays_slow_ends_its_request_only(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    open_all(grammars, {1: OBJECT, 2: OBJECT})
    # The clock is read before and after each mask: that of the first row takes time, and no other.
    readings = itertools.accumulate(itertools.cycle([0.0, 0.6 * grammars_module.MAX_SLOW_S, 0.0, 0.0]))
    slow = SimpleNamespace(thread_time=lambda: next(readings), monotonic=itertools.count().__next__)
    monkeypatch.setattr(grammars_module, "time", slow)
    for _ in range(2):  # From the second step on, masks are timed one by one.
        allowed(grammars, [1, 2])
        assert grammars.take_failed() == []
    rows = allowed(grammars, [1, 2])
    assert rows[1] == {ord("{")}
    (failure,) = grammars.take_failed()
    assert failure.request_id == 1
    assert "too long to follow" in failure.message
    grammars.close(1)
    open_all(grammars, {1: OBJECT})
    allowed(grammars, [1, 2])
    assert grammars.take_failed() == [], "a new request with this id has used no time"


def test_closed_requests_are_forgotten(grammars: Grammars) -> None:
    open_all(grammars, {1: OBJECT, 2: OBJECT})
    grammars.open(3, YES, "", 0.0)
    for request_id in (1, 3, 99):
        grammars.close(request_id)
    assert len(grammars) == 1
    assert grammars.take_ready(0.0) == []
    grammars.consume([1, 2], [ord("x"), ord("{")])
    assert grammars.take_failed() == []


def test_the_grammar_travels_with_the_request() -> None:
    grammar = Grammar("json_schema", json.dumps({"const": "é"}))
    request = NewRequest(id=1, prompt=b"", params=SamplingParams(grammar=grammar, max_tokens=5, seed=3))
    received = decode_to_engine(msgspec.msgpack.encode(request))
    assert isinstance(received, NewRequest)
    assert received.params.grammar == grammar
    assert received.params.with_seed(4).grammar == grammar
    assert hash(received.params.grammar) == hash(grammar)


@pytest.mark.live
def test_importing_the_engine_does_not_import_llguidance() -> None:
    script = "import sys, millrace.engine.grammars; assert not {'llguidance', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
