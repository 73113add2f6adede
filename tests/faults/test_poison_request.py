"""A request whose computation fails does not affect other requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_server import tiny_source

from millrace import LLM, SamplingParams
from millrace.errors import RequestFailed
from millrace.plan.step import StepPlan
from millrace.run.device.device import CpuDevice
from millrace.run.runner import Runner

POISON = 3137


# A step cannot be made to fail from outside, so these tests replace the runner's own method.
def test_a_poison_request_fails_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    execute = Runner.execute

    def poisoned(self: Runner, plan: StepPlan, given: Any) -> Any:
        result = execute(self, plan, given)
        if any(POISON in self.table.tokens[row] for row in plan.rows):
            raise RuntimeError("this token is poison")
        return result

    monkeypatch.setattr(Runner, "execute", poisoned)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[index + 50, index + 60, index + 70] for index in range(6)]
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000) as llm:
        expected = [generation.token_ids for generation in llm.generate(prompts, params)]

        async def one(prompt: list[int]) -> list[int]:
            return [part.token_id async for part in llm.stream(prompt, params) if part.token_id is not None]

        async def together() -> list[Any]:
            jobs = [one(prompt) for prompt in [*prompts[:3], [5, POISON, 6], *prompts[3:]]]
            return await asyncio.gather(*jobs, return_exceptions=True)

        results = asyncio.run(together())
        culprit = results.pop(3)
        assert isinstance(culprit, RequestFailed)
        assert "this token is poison" in culprit.message
        assert results == expected
        assert llm.generate([prompts[0]], params)[0].token_ids == expected[0]


def test_device_failure_ends_every_request_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Runner, plan: StepPlan, given: Any) -> Any:
        raise RuntimeError("the device fell over")

    def probe(self: CpuDevice) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(CpuDevice, "probe", probe)
    with LLM(tiny_source(tmp_path), dtype="float32", kv_tokens=4000) as llm:
        monkeypatch.setattr(Runner, "execute", broken)
        with pytest.raises(RequestFailed, match="the device is gone"):
            llm.generate(["hello"], SamplingParams(max_tokens=4))
