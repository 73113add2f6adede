"""A request that another engine began goes on where that engine stopped, and is counted as one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.fake_channel import FakeChannel
from helpers.fake_runner import FakeDevice, FakeRunner, run_engine

pytest.importorskip("llguidance")

from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.explain import explain
from millrace.engine.grammars import Grammars
from millrace.engine.ledger import Ledger
from millrace.engine.loop import Engine
from millrace.engine.parts import EngineParts
from millrace.link.frames import HEADER
from millrace.link.messages import Finish, NewRequest, Resumption, decode_to_engine, encode_frame, pack_tokens
from millrace.params.grammar import Grammar, ThinkingLimit
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request, end_of
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.stand_in import build_stand_in

END, VOCAB = 299, 300
SCHEMA = Grammar("json_schema", '{"type": "array", "items": {"enum": ["left", "right", "none"]}, "minItems": 3}')
PROMPT = tuple(range(40, 61))


def request(params: SamplingParams, so_far: list[int] | None = None, ends: tuple[int, ...] = (END,)) -> NewRequest:
    resumed = None if so_far is None else Resumption(pack_tokens(so_far), first_token=2.0, lost=3.0)
    message = NewRequest(1, pack_tokens(PROMPT), params, ends, arrival=1.0, names=("asked", "answer"), resumed=resumed)
    decoded = decode_to_engine(bytes(encode_frame(message))[HEADER.size :])
    assert isinstance(decoded, NewRequest)
    return decoded


def answer(message: NewRequest) -> tuple[list[int], Finish]:
    """Of an engine that is new to the request."""
    scheduler = Scheduler(SchedulerSettings(num_blocks=256, block_size=4, max_running=4, token_budget=16))
    tokenizer = build_stand_in({"vocab_size": VOCAB, "eos_token_id": END})
    constrained = ConstrainedRequests(Grammars(lambda: GrammarEnvironment(tokenizer, VOCAB, 1)))
    channel = FakeChannel([message])
    runner = FakeRunner(VOCAB)
    run_engine(
        Engine(scheduler, runner, FakeDevice(), channel, facts=runner.facts, parts=EngineParts(constrained=constrained))
    )
    [finish] = [finish for _, sent in channel.sent for finish in sent.finished]
    return channel.tokens.get(1, []), finish


CASES: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "limit": (SamplingParams(max_tokens=30), {}),
    "end token": (SamplingParams(max_tokens=30, min_tokens=12), {"ends": (3,)}),
    "schema": (SamplingParams(max_tokens=60, grammar=SCHEMA), {}),
    "schema and least length": (SamplingParams(max_tokens=60, grammar=SCHEMA, min_tokens=40), {}),
    "cut schema": (SamplingParams(max_tokens=18, grammar=SCHEMA), {}),
    "limit on reasoning": (SamplingParams(max_tokens=30, thinking=ThinkingLimit(9, 297, 298, is_open=True)), {}),
}


@pytest.mark.parametrize(("params", "more"), CASES.values(), ids=CASES)
def test_an_answer_goes_on_as_if_nothing_had_happened(params: SamplingParams, more: dict[str, Any]) -> None:
    whole, end = answer(request(params, **more))
    assert len(whole) > 10
    for cut in (0, 1, 5, 9, len(whole) - 1):
        rest, finish = answer(request(params, whole[:cut], **more))
        assert rest == whole[cut:], cut
        assert (finish.reason, finish.stop_token_id) == (end.reason, end.stop_token_id)
        assert (finish.prompt_tokens, finish.output_tokens) == (len(PROMPT), end.output_tokens)


def test_a_request_that_comes_with_its_whole_answer_ends_at_once() -> None:
    params = SamplingParams(max_tokens=4)
    tokens, finish = answer(request(params, [1, 2, 3, 4]))
    assert (tokens, finish.reason, finish.output_tokens) == ([], "length", 4)


def test_output_that_its_grammar_forbids_ends_the_request_with_a_sentence() -> None:
    tokens, finish = answer(request(SamplingParams(max_tokens=60, grammar=SCHEMA), [1, 2, 3]))
    assert (tokens, finish.reason, finish.output_tokens) == ([], "refused", 3)
    assert "grammar" in finish.message


def test_found_blocks_of_output_are_no_cached_prompt() -> None:
    scheduler = Scheduler(SchedulerSettings(num_blocks=64, block_size=4, max_running=4, token_budget=64))
    tokens = np.arange(24, dtype=np.int32)
    scheduler.submit(Request(0, tokens, 1))
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.apply(first.step_no, np.array([24], np.int32))
    resumed = Request(1, tokens[:6], 40, output=tokens[6:].tobytes())
    scheduler.submit(resumed)
    second = scheduler.plan(1.0)
    assert second is not None
    assert (second.starts.tolist(), second.counts.tolist()) == ([20], [4])
    assert resumed.cached_tokens == 6


def taken_over(so_far: list[int]) -> tuple[Ledger, Request]:
    ledger = Ledger()
    message = request(SamplingParams(max_tokens=8), so_far)
    taken = Request(1, np.array(PROMPT, np.int32), 8, output=pack_tokens(so_far))
    ledger.open(message, taken, 5.0)
    return ledger, taken


def test_times_and_sentences_of_a_request_with_tokens() -> None:
    ledger, taken = taken_over([7, 8, 9])
    assert ledger.on_admitted(1, 6.0) == 3.0, "the gap before its next token begins where the engine was lost"
    finish = ledger.close(end_of(taken, "length", 8), 9.0)
    assert (finish.queued_s, finish.first_token_s, finish.total_s) == (0.0, 1.0, 8.0)
    [sequence] = explain(ledger.named("asked", None), 9.0)["sequences"]
    stages = sequence["stages_s"]
    assert stages == {"front": 0.0, "lost": 4.0, "queue": 1.0, "decode": 3.0, "total": 8.0}
    assert sequence["resumed"]["count"] == 1
    assert "after 3 tokens" in sequence["resumed"]["why"]
    assert "2.000 s later" in sequence["resumed"]["why"]


def test_times_and_sentences_of_a_request_that_begins_again() -> None:
    ledger, taken = taken_over([])
    ledger.on_admitted(1, 6.0)
    ledger.on_first_token(1, 7.0)
    finish = ledger.close(end_of(taken, "length", 8), 9.0)
    assert (finish.queued_s, finish.first_token_s, finish.total_s) == (5.0, 6.0, 8.0)
    [sequence] = explain(ledger.named("asked", None), 9.0)["sequences"]
    stages = sequence["stages_s"]
    assert stages == {"front": 0.0, "lost": 4.0, "queue": 1.0, "prefill": 1.0, "decode": 2.0, "total": 8.0}
    assert "before its first token" in sequence["resumed"]["why"]
