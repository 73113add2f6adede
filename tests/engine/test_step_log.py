"""The step log: what is written is read back, and running its steps again draws the same tokens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace import LLM, SamplingParams
from millrace.bench.errors import BenchError
from millrace.bench.micro.replay import replay_log
from millrace.config import RunConfig
from millrace.params import Grammar, RowParams
from millrace.plan.scheduler import Scheduler
from millrace.plan.step import Admission, Appended, ForcedDrafts, Int32s, Release, StepPlan, StepShape, exact_shape
from millrace.run.runner import StepResult
from millrace.run.step_log import Copied, Drawn, Masked, Planned, RunnerSetup, StepLog, decode, encode, read_log

SETUP = RunnerSetup("m", "float32", "none", 0, False, "full", "off", 8, 4, 2, 64, 32, 0, 1)

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "n": {"type": "integer"}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}


def ints(*values: int) -> Int32s:
    return np.array(values, np.int32)


def a_plan(step_no: int, epoch: int) -> StepPlan:
    params = SamplingParams(logit_bias=((3, -1.5),), grammar=Grammar("json_object"), seed=7, stop=("x",))
    tokens = ints(5, 6, 7)
    return StepPlan(
        step_no=step_no,
        rows=ints(1, 0),
        starts=ints(9, 4),
        counts=ints(1, 1),
        samples=np.array([True, False]),
        block_rows=ints(1),
        block_cols=ints(2),
        block_ids=ints(8),
        shape=exact_shape(ints(1, 1), 2),
        admitted=(Admission(1, 2**50, tokens, 2, RowParams(params, (0, 9)), limit=40, num_computed=1),),
        released=(Release(0, 3, "preempted"),),
        appended=(Appended(1, 4, tokens),),
        forced=(ForcedDrafts(1, tokens),),
        block_groups=ints(0),
        draft_places=ints(2, 0),
        masked=np.array([True, False]),
        epoch=epoch,
    )


def plain(value: object) -> object:
    """Arrays as lists with their type, so that records can be compared."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    return [plain(part) for part in value] if isinstance(value, tuple) else value


def test_a_plan_is_read_as_it_was_written() -> None:
    record = decode(encode(Planned(a_plan(3, 1))))
    assert isinstance(record, Planned)
    assert plain(record.plan) == plain(a_plan(3, 1))


def test_repeated_plans_are_short_and_read_back_whole(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    StepLog(file, SETUP)  # An earlier start.
    log = StepLog(file, SETUP)
    first = a_plan(0, 1)
    second = dataclasses.replace(
        first,
        step_no=1,
        starts=first.starts + 1,
        block_ids=ints(5),
        shape=StepShape(4, 4, 0, is_decode=True, places=2),
        captures=True,
        admitted=(),
        released=(),
        appended=(),
        forced=(),
    )
    log.plan(first)
    size = file.stat().st_size
    log.plan(second)
    log.plan(a_plan(2, 2))
    log._file.flush()  # Plans are flushed with the next tokens.
    assert file.stat().st_size - size < 3 * len(encode(Planned(first)))
    records = list(read_log(file))
    assert isinstance(records[0], RunnerSetup)
    plans = [record.plan for record in records if isinstance(record, Planned)]
    assert [plain(plan) for plan in plans] == [plain(plan) for plan in (first, second, a_plan(2, 2))]
    file.write_bytes(file.read_bytes()[:-3])
    assert len(list(read_log(file))) == 3, "a record that was not written whole is left out"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_ends_the_log_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(Path("/dev/full"), SETUP)
    for step_no in range(2):
        log.plan(a_plan(step_no, step_no))
        log.drawn(StepResult(step_no, torch.tensor([3]), None, np.zeros(0, np.int64), ints(), ()))
    assert caplog.text.count("the step log ends here") == 1


def test_running_the_steps_again_draws_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # How many drafts there are must not depend on how busy the machine is.
    monkeypatch.setattr(Scheduler, "observe_step", lambda *_: None)
    file = tmp_path / "steps"
    rng = np.random.default_rng(0)
    prompts = [rng.integers(300, 40_000, 40).tolist() * 3 for _ in range(6)]
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    params = [
        SamplingParams(max_tokens=12, temperature=index % 2, seed=index, grammar=grammar if index < 3 else None)
        for index in range(6)
    ]
    settings = {"speculate": "ngram", "kv_tokens": 400, "kv_host_gib": 0.1, "max_running": 4, "token_budget": 50}
    with LLM(dtype="float32", step_log=str(file), **settings) as llm:
        answers = [generation.token_ids for generation in llm.generate(prompts, params)]
        llm.generate(prompts, params)
    records = list(read_log(file))
    assert {type(record) for record in records} == {RunnerSetup, Planned, Masked, Drawn, Copied}
    assert sum(len(drafts) for record in records if isinstance(record, Masked) for drafts in record.drafts) > 2
    done = replay_log(file, RunConfig())
    assert done.num_different == 0
    assert done.num_tokens > sum(map(len, answers)) / 2


def test_a_file_that_is_no_log_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(b"\x05" + bytes(7) + b"hello")
    with pytest.raises(BenchError, match="other"):
        replay_log(file, RunConfig())
