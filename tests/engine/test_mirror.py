"""The mirror: a second process runs every step from the same bytes and draws the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.engine_stats import stats_after
from helpers.inside import client_of
from helpers.mixed_requests import MIXED_SETTINGS, mixed_requests
from helpers.served import wait_until
from helpers.tiny_server import CONFIG, tiny_source

from millrace import LLM, SamplingParams
from millrace.engine.ranks.mirror import Mirror
from millrace.errors import EngineUnavailable, RequestFailed
from millrace.link.engine_stats import MirrorStats
from millrace.observe.engine_metrics import engine_metrics
from millrace.plan.queue.admission_forecast import AdmissionForecast
from millrace.plan.shapes.declared import OwnSizes
from millrace.plan.step import StepPlan
from millrace.run.protocol import StepResult
from millrace.run.runner import Runner

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

POISON, VOCAB_SIZE = 3137, CONFIG["vocab_size"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[index + 50, index + 60, index + 70] for index in range(6)]


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> list[Mirror]:
    """Those that were started, oldest first."""
    started: list[Mirror] = []
    create = Mirror.__init__

    def watched(self: Mirror, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        started.append(self)

    monkeypatch.setattr(Mirror, "__init__", watched)
    return started


def mirror_stats(llm: LLM, num_requests: int) -> MirrorStats:
    stats = stats_after(llm, num_requests).mirror
    assert stats is not None
    return stats


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's steps with this token fail. A step cannot be made to fail from outside."""
    execute = Runner.execute

    def poisoned(self: Runner, plan: StepPlan, given: Any) -> Any:
        result = execute(self, plan, given)
        if any(POISON in self.table.tokens[row] for row in plan.rows):
            raise RuntimeError("this token is poison")
        return result

    monkeypatch.setattr(Runner, "execute", poisoned)


async def stream(llm: LLM, prompt: list[int]) -> list[int]:
    return [part.token_id async for part in llm.stream(prompt, GREEDY) if part.token_id is not None]


def test_every_draw_of_a_mixed_load_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drafts, grammars, prefix hits, host memory, preemption, vectors, and a request that makes steps fail."""
    monkeypatch.setattr(AdmissionForecast, "admit", lambda *_: True)
    poison(monkeypatch)
    prompts, params = mixed_requests(VOCAB_SIZE)
    source = tiny_source(tmp_path)
    with LLM(source, dtype="float32", mirror=True, **MIXED_SETTINGS) as llm, ThreadPoolExecutor(2) as beside:
        vectors = [beside.submit(llm.embed, prompts[:3], pooling=pooling) for pooling in ("last", "mean")]
        answers = [generation.token_ids for generation in llm.generate(prompts, params)]
        assert all(len(each.result(300)) == 3 for each in vectors)
        with pytest.raises(RequestFailed, match="this token is poison"):
            asyncio.run(stream(llm, [5, POISON, 6]))
        # What a tiny model says repeats nothing: without predictions, only grammars would have drafts.
        predicted = [
            msgspec.structs.replace(one, prediction=tuple(answer))
            for one, answer in zip(params[2:], answers[2:], strict=True)
        ]
        llm.generate(prompts, [*params[:2], *predicted])
        stats = stats_after(llm, 2 * len(prompts) + 7)
    assert stats.mirror is not None
    assert (stats.mirror.is_up, stats.mirror.differences) == (True, 0)
    assert stats.mirror.steps > 40
    found = (stats.accepted_tokens, stats.preemptions, stats.prefix_hit_tokens, stats.host_tokens_loaded)
    assert all(found), found


def test_a_difference_is_named_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = StepResult.drawn

    def other(self: StepResult) -> np.ndarray:
        tokens = drawn(self)
        return tokens + 1 if self.step_no == 4 else tokens

    monkeypatch.setattr(StepResult, "drawn", other)
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, mirror=True) as llm:
        answers = [generation.token_ids for generation in llm.generate(PROMPTS, GREEDY)]
        stats = mirror_stats(llm, len(PROMPTS))
        metrics = {one.name: one.value for family in engine_metrics(client_of(llm)) for one in family.samples}
        again = llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    assert len(again) == 12
    assert (metrics["millrace_mirror_up"], metrics["millrace_mirror_differences_total"]) == (0, 1)
    assert stats == MirrorStats(is_up=False, steps=4, differences=1)
    step_tokens = {tokens[4] for tokens in answers}
    sentence = next(line for line in caplog.text.splitlines() if "The draws differ in step 4, row " in line)
    said, mirrored = (int(part.split()[0].rstrip(",.")) for part in sentence.split(" drew ")[1:])
    assert said == mirrored + 1
    assert said in step_tokens


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(("harm", "says"), [(kill, "exit code -9"), (stop, "has not answered for")])
def test_the_engine_goes_on_without_a_mirror_that_ends(
    harm: Callable[[int], None],
    says: str,
    mirrors: list[Mirror],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, mirror=True) as llm:
        expected = [generation.token_ids for generation in llm.generate(PROMPTS, GREEDY)]
        assert mirror_stats(llm, len(PROMPTS)).is_up
        mirrors[0].reply_limit_s = 1.0
        harm(mirrors[0].pid)
        assert [generation.token_ids for generation in llm.generate(PROMPTS, GREEDY)] == expected
        wait_until(lambda: not mirrors[0].stats.is_up, "the mirror's end")
        assert mirror_stats(llm, 2 * len(PROMPTS)).differences == 0
    assert f"the engine goes on without it: it{'s process ended with ' if harm is kill else ' '}{says}" in caplog.text
    assert caplog.text.count("the mirror has ended") == 1


def test_a_mirror_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("millrace.engine.ranks.mirror.CHILD", "millrace.engine.ranks.no_such_module")
    with pytest.raises(
        EngineUnavailable, match=r"The mirror \(--mirror\) did not start: its process ended with exit code 1"
    ):
        LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, mirror=True).__enter__()


def test_a_mirror_with_other_shapes_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only in this process: another kind of device would declare others."""
    monkeypatch.setattr(OwnSizes, "digest", "others")
    says = "did not start: it declares other step shapes than rank 0"
    with pytest.raises(EngineUnavailable, match=says):
        LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, mirror=True).__enter__()


def test_the_process_ends_if_the_engine_cannot_be_built(mirrors: list[Mirror], tmp_path: Path) -> None:
    log = tmp_path / "steps"
    log.write_bytes(b"no step log, but something of somebody else's")
    with pytest.raises(EngineUnavailable, match="is no step log"):
        LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, mirror=True, step_log=str(log)).__enter__()
    wait_until(lambda: mirrors[0].process.poll() is not None, "the mirror's end")


def test_the_process_ends_with_the_engine(mirrors: list[Mirror], tmp_path: Path) -> None:
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, mirror=True) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert mirrors[0].process.poll() is None
    assert mirrors[0].process.poll() is not None
