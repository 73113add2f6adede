"""The mirror on a GPU: two processes share the device, run every step from the same bytes and draw the same tokens."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_stats import stats_after
from helpers.mixed_requests import MIXED_SETTINGS, mixed_requests
from helpers.tiny_server import CONFIG

from millrace import LLM, SamplingParams
from millrace.errors import RequestFailed
from millrace.plan.queue.admission_forecast import AdmissionForecast
from millrace.plan.step import StepPlan
from millrace.run.cuda_runner import CudaRunner
from millrace.run.graphs.graph_cache import Captured, GraphCache

pytestmark = [pytest.mark.gpu, pytest.mark.live, pytest.mark.timeout(600)]

POISON, VOCAB = 3137, 4096
MODEL = CONFIG | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's steps with this token fail. A step cannot be made to fail from outside."""
    draw = CudaRunner.run_draw

    def poisoned(self: CudaRunner, plan: StepPlan, *args: Any, **options: Any) -> Any:
        result = draw(self, plan, *args, **options)
        if any(POISON in self.table.host_part(row, 0, 99) for row in plan.rows.tolist()):
            raise RuntimeError("this token is poison")
        return result

    monkeypatch.setattr(CudaRunner, "run_draw", poisoned)


def fail_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rank 0, from the fourth on. The mirror has all graphs."""
    capture, made = GraphCache.capture, []

    def failing(self: GraphCache, key: object, work: Any) -> Captured | None:
        made.append(key)
        if len(made) > 3:
            self.is_capturing = False
            return None
        return capture(self, key, work)

    monkeypatch.setattr(GraphCache, "capture", failing)


@pytest.mark.parametrize("speculate", ["off", "suffix"])
@pytest.mark.parametrize("captures", ["all", "few"])
def test_every_draw_of_a_mixed_load_is_the_same_on_a_gpu(
    speculate: str, captures: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Drafts, grammars, prefix hits, host memory, preemption, vectors, failed captures, and a request that makes steps
    fail."""
    monkeypatch.setattr(AdmissionForecast, "admit", lambda *_: True)
    poison(monkeypatch)
    if captures == "few":
        fail_captures(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    source, (prompts, params) = f"random:{tmp_path / 'config.json'}", mixed_requests(VOCAB)
    settings = MIXED_SETTINGS | {"speculate": speculate, "block_size": 16, "token_budget": 64, "kv_tokens": 320}
    with LLM(source, device="cuda", mirror=True, **settings) as llm, ThreadPoolExecutor(1) as beside:
        for _ in range(2):
            vectors = beside.submit(llm.embed, prompts[:3])
            llm.generate(prompts, params)
            assert len(vectors.result(300)) == 3
        with pytest.raises(RequestFailed, match="this token is poison"):
            asyncio.run(_stream(llm, [5, POISON, 6]))
        llm.generate(prompts, params)
        stats = stats_after(llm, 3 * len(prompts) + 7)
    assert stats.mirror is not None
    assert (stats.mirror.is_up, stats.mirror.differences) == (True, 0)
    assert stats.mirror.steps > 40
    found = (stats.preemptions, stats.prefix_hit_tokens, stats.host_tokens_loaded)
    assert all(found), found
    assert stats.accepted_tokens or speculate == "off"


async def _stream(llm: LLM, prompt: list[int]) -> list[int]:
    return [part.token_id async for part in llm.stream(prompt, GREEDY) if part.token_id is not None]
