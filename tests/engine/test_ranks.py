"""A model split over ranks: every answer is that of one rank, and a lost rank ends the engine at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.engine_stats import stats_after
from helpers.inside import client_of
from helpers.served import wait_until
from helpers.tiny_files import write_tiny
from helpers.tiny_models import HYBRIDS
from helpers.tiny_server import tiny_source

from millrace import LLM, SamplingParams
from millrace.engine.ranks import group as group_module
from millrace.engine.ranks.group import RankGroup
from millrace.errors import ConfigError, EngineUnavailable, RequestFailed
from millrace.params.grammar import Grammar
from millrace.plan.queue.admission_forecast import AdmissionForecast
from millrace.plan.shapes.declared import OwnSizes

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "speculate": "ngram",
    "block_size": 8,
    "kv_tokens": 200,
    "kv_host_gib": 0.01,
    "max_running": 4,
    "token_budget": 50,
    "draft_tokens": 3,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[index + 50, index + 60, index + 70] for index in range(6)]
POISON = 3137
PROCESSORS = f"""
import sys

def everywhere(token_ids, logits):
    if {POISON} in token_ids.tolist():
        raise RuntimeError("this token is poison")
    return logits

def on_another_rank(token_ids, logits):
    return everywhere(token_ids, logits) if "rank_child" in sys.argv[0] else logits
"""


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Half of the prompts begin alike, all repeat themselves, and their answers are drawn in every way."""
    rng = np.random.default_rng(0)
    shared = rng.integers(300, 4000, 32).tolist()
    prompts = [shared * (index % 2) + rng.integers(300, 4000, 20).tolist() * 3 for index in range(8)]
    others: list[dict[str, Any]] = [
        {"grammar": Grammar("regex", "[a-c]{4}(yes|no)"), "temperature": 0.0},
        {"grammar": Grammar("regex", "(yes|no)(, (yes|no)){3}"), "temperature": 0.0},
        {"temperature": 0.0},
        {"logprobs": 2, "top_p": 0.9},
        {"frequency_penalty": 0.5, "prompt_logprobs": 1},
        {"typical_p": 0.9, "dry_multiplier": 0.8, "bad_words": ("the",)},
        {"logit_bias": ((300, 2.0),), "min_tokens": 3, "top_k": 40},
        {"temperature": 0.0, "prediction": tuple(prompts[7])},
    ]
    return prompts, [SamplingParams(max_tokens=20, seed=index, **other) for index, other in enumerate(others)]


@dataclass
class Answers:
    tokens: list[list[int]]
    logprobs: list[float]
    vectors: np.ndarray
    stats: Any


def answers_with(source: str, num_ranks: int) -> Answers:
    prompts, params = mixed_requests()
    with LLM(source, tensor_parallel=num_ranks, **SETTINGS) as llm, ThreadPoolExecutor(2) as beside:
        vectors = [beside.submit(llm.embed, prompts[:3], pooling=pooling) for pooling in ("last", "mean")]
        generations = llm.generate(prompts, params) + llm.generate(prompts, params)
        return Answers(
            [generation.token_ids for generation in generations],
            [entry.logprob for one in generations for entry in one.choices[0].logprobs or []],
            np.concatenate([np.stack(each.result(300)) for each in vectors]),
            stats_after(llm, 2 * len(prompts) + 6),
        )


def test_every_answer_is_that_of_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With drafts, grammars, prefix hits, host memory, preemption, log-probabilities and vectors."""
    monkeypatch.setattr(AdmissionForecast, "admit", lambda *_: True)
    source = tiny_source(tmp_path)
    expected = answers_with(source, 1)
    for num_ranks in (2, 3):
        found = answers_with(source, num_ranks)
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert found.vectors == pytest.approx(expected.vectors, abs=1e-4)
        stats = found.stats
        met = (stats.accepted_tokens, stats.preemptions, stats.prefix_hit_tokens, stats.host_tokens_loaded)
        assert all(met), met


@pytest.mark.parametrize("case", ["deepseek_v3", "granite_hybrid", "gpt_oss"])
def test_other_mixers_give_the_tokens_of_one_rank(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Latents, which every rank has; recurrent states; sinks, windows and experts. With prefix hits, preemption and
    drafts."""
    monkeypatch.setattr(AdmissionForecast, "admit", lambda *_: True)
    write_tiny(tmp_path / "m", case)
    rng = np.random.default_rng(1)
    shared = rng.integers(1, 97, 24).tolist()
    prompts = [shared[: 12 + 4 * (index % 3)] + rng.integers(1, 97, 5).tolist() * 3 for index in range(8)]
    # Sums in another order move a probability by about 1e-7. None of these seeds draws that close to a boundary.
    params = [
        SamplingParams(temperature=index % 2 * 0.8, seed=index + 8, max_tokens=14, ignore_eos=True)
        for index in range(8)
    ]
    found, stats = [], []
    for num_ranks in (1, 2):
        # A pool that preempts: most layers of gpt-oss have a window.
        pool = {"block_size": 5, "kv_tokens": 70 if case == "gpt_oss" else 120, "kv_dtype": "full"}
        settings = SETTINGS | pool | {"tensor_parallel": num_ranks}
        with LLM(str(tmp_path / "m"), device="cpu", **settings) as llm:
            made = [generation.token_ids for generation in llm.generate(prompts, params)]
            # Answers that are known before are drafts that are right.
            known = [msgspec.structs.replace(own, prediction=tuple(made[i])) for i, own in enumerate(params)]
            assert [generation.token_ids for generation in llm.generate(prompts, known)] == made
            found.append(made)
            stats.append(stats_after(llm, 2 * len(prompts)))
    assert found[1] == found[0]
    own = stats[1]
    assert own.prefix_hit_tokens
    assert own.preemptions
    assert own.accepted_tokens
    assert bool(own.state_hits) == (case in HYBRIDS)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[RankGroup]:
    """Those that were started, oldest first."""
    started: list[RankGroup] = []
    create = RankGroup.__init__

    def watched(self: RankGroup, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        started.append(self)

    monkeypatch.setattr(RankGroup, "__init__", watched)
    return started


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of a module that this process and the ranks can import."""
    (tmp_path / "poisonous.py").write_text(PROCESSORS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "poisonous"


async def stream(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return [part.token_id async for part in llm.stream(prompt, params) if part.token_id is not None]


def test_a_request_that_fails_on_all_ranks_fails_alone(processors: str, tmp_path: Path) -> None:
    name = f"{processors}.everywhere"
    shaped = msgspec.structs.replace(GREEDY, logits_processors=(name,))

    async def together(llm: LLM) -> list[Any]:
        jobs = [stream(llm, prompt, shaped) for prompt in [*PROMPTS[:3], [5, POISON, 6], *PROMPTS[3:]]]
        return await asyncio.gather(*jobs, return_exceptions=True)

    settings: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4000, "tensor_parallel": 2}
    with LLM(tiny_source(tmp_path), allow_logits_processors=name, **settings) as llm:
        expected = [generation.token_ids for generation in llm.generate(PROMPTS, GREEDY)]
        results = asyncio.run(together(llm))
        culprit = results.pop(3)
        assert isinstance(culprit, RequestFailed)
        assert "this token is poison" in culprit.message
        assert results == expected
        assert llm.generate([PROMPTS[0]], GREEDY)[0].token_ids == expected[0]


def test_a_step_that_fails_on_one_rank_ends_the_engine(
    processors: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{processors}.on_another_rank"
    shaped = msgspec.structs.replace(GREEDY, logits_processors=(name,))
    settings: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4000, "tensor_parallel": 2}
    with LLM(tiny_source(tmp_path), allow_logits_processors=name, **settings) as llm:
        assert len(asyncio.run(stream(llm, PROMPTS[0], shaped))) == 12
        with pytest.raises((EngineUnavailable, RequestFailed), match="A step failed on rank 1 of 2 and not on the"):
            asyncio.run(stream(llm, [5, POISON, 6], shaped))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(("harm", "says"), [(kill, "has ended"), (stop, "has stalled: no sign of it for 5 s")])
def test_an_idle_engine_notices_a_lost_rank(
    harm: Callable[[int], None],
    says: str,
    groups: list[RankGroup],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, tensor_parallel=2) as llm:
        assert len(llm.generate(PROMPTS[:1], GREEDY)[0].token_ids) == 12
        harm(groups[0].pids[0])
        wait_until(lambda: "The engine ends with it." in caplog.text, "the rank's loss")
        wait_until(lambda: client_of(llm).failure is not None, "the engine's end")
        with pytest.raises(EngineUnavailable, match=f"Rank 1 of 2 {says}"):
            llm.generate(PROMPTS[:1], GREEDY)


def test_a_step_that_finds_a_lost_rank_first_blames_no_request(
    groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thread that listens to the rank does not learn of its end in this test."""
    monkeypatch.setattr(group_module, "EXIT_LIMIT_S", 0.1)

    async def killed(llm: LLM) -> None:
        params = msgspec.structs.replace(GREEDY, max_tokens=3000)
        async for _ in llm.stream(PROMPTS[0], params):
            if not done:
                done.append(1)
                process = groups[0].others[0].process
                wait = process.wait

                def slow(*args: Any, wait: Callable[..., int] = wait) -> int:
                    if threading.current_thread().name == "rank-1":
                        gate.wait(60)
                    return wait(*args)

                monkeypatch.setattr(process, "wait", slow)
                kill(process.pid)

    gate, done = threading.Event(), list[int]()
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, tensor_parallel=2) as llm:
        with pytest.raises((EngineUnavailable, RequestFailed), match=r"^Rank 1 of 2 has ended\. The engine ends"):
            asyncio.run(killed(llm))
        gate.set()


def test_a_rank_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(group_module, "CHILD", "millrace.engine.ranks.no_such_module")
    says = r"The ranks \(--tensor-parallel 2\) did not start: Rank 1 of 2 has ended: its process has exit code 1"
    with pytest.raises(EngineUnavailable, match=says):
        LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, tensor_parallel=2).__enter__()


def test_a_rank_with_other_shapes_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only in this process: another kind of device would declare others."""
    monkeypatch.setattr(OwnSizes, "digest", "others")
    says = r"The ranks \(--tensor-parallel 2\) did not start: Rank 1 declares other step shapes than rank 0"
    with pytest.raises(EngineUnavailable, match=says):
        LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, tensor_parallel=2).__enter__()


def test_the_processes_end_with_the_engine(groups: list[RankGroup], tmp_path: Path) -> None:
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000, tensor_parallel=2) as llm:
        llm.generate(PROMPTS, GREEDY)
        process = groups[0].others[0].process
        assert process.poll() is None
        wait_until(lambda: groups[0].num_same > 5, "draws are compared")
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mirror": True}, "leave --mirror out"),
        ({"tensor_parallel": 5}, r"has 4 attention heads, .* Set --tensor-parallel 4 or less"),
    ],
)
def test_what_cannot_be_split_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4000, "tensor_parallel": 2} | settings
    with pytest.raises((EngineUnavailable, ConfigError), match=says):
        LLM(tiny_source(tmp_path), **options).__enter__()
