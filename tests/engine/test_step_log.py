"""The step log: what is written is read back, and running its steps again draws the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from helpers.mixed_requests import MIXED_SETTINGS, mixed_requests
from helpers.step_messages import plain
from helpers.tiny_server import CONFIG, tiny_source

from millrace import LLM, SamplingParams
from millrace.bench.errors import BenchError
from millrace.bench.micro.replay import replay_log
from millrace.config import RunConfig
from millrace.errors import ConfigError
from millrace.params.rows import RowParams
from millrace.plan.codec.encoder import encode_inputs, encode_plan
from millrace.plan.queue.admission_forecast import AdmissionForecast
from millrace.plan.scheduler import Scheduler
from millrace.plan.step import (
    Admission,
    BlockCopies,
    CapturePlan,
    HeadShape,
    Int32s,
    Masks,
    Release,
    StepInputs,
    StepPlan,
    exact_shape,
)
from millrace.run.device.device import Pending
from millrace.run.drafting.drafters import Drafters
from millrace.run.protocol import StepResult
from millrace.run.ranks.recorder import LoggedResult, RecordedRunner, RunnerSetup, StepRecorder
from millrace.run.step_log import FIRST_LINE, StepLog, read_log

VOCAB_SIZE = CONFIG["vocab_size"]
SETUP = RunnerSetup("m", "float32", "none", 0, False, "full", "off", 8, 4, 2, 64, 32, 0, 1)


def ints(*values: int) -> Int32s:
    return np.array(values, np.int32)


def a_plan(step_no: int, epoch: int) -> StepPlan:
    tokens, params = ints(5, 6, 7), SamplingParams(logit_bias=((3, -1.5),), seed=7).of_draws()
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
        epoch=epoch,
    )


def a_result(step_no: int, *tokens: int) -> StepResult:
    return StepResult(step_no, torch.tensor(tokens), None, np.zeros(0, np.int64), ints(), ())


def recorder(file: Path, setup: RunnerSetup = SETUP) -> StepRecorder:
    return StepRecorder(StepLog(file), setup)


def write_everything(log: StepRecorder) -> list[object]:
    """One record of every kind but the setup, and what they should be read as."""
    masks = Masks(np.array([0]), np.array([[7, 1]], np.uint32))
    inputs = StepInputs(0, masks, (ints(3, 4),))
    copies, capture = BlockCopies(1, "device", "host", ints(2), ints(0)), CapturePlan(HeadShape(4, "full"))
    log.plan(a_plan(0, 1))
    log.inputs(inputs)
    log.copies(copies)
    log.capture(capture)
    log.result(a_result(0, 3))
    return [a_plan(0, 1), inputs, copies, capture, LoggedResult(0, ints(3).tobytes())]


def test_records_of_the_last_start_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    write_everything(recorder(file))
    setup = msgspec.structs.replace(SETUP, model="other")
    written = write_everything(recorder(file, setup))
    assert [plain(record) for record in read_log(file)] == [plain(record) for record in [setup, *written]]
    assert file.read_bytes().count(FIRST_LINE) == 1


def test_a_record_that_was_not_written_whole_is_left_out_and_does_not_hide_later_ones(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    written = write_everything(recorder(file))
    file.write_bytes(file.read_bytes()[:-3])
    assert len(read_log(file)) == len(written), "the setup, and all but the last"
    write_everything(recorder(file))
    assert [plain(record) for record in read_log(file)] == [plain(record) for record in [SETUP, *written]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_ends_the_log_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:
    log = recorder(Path("/dev/full"))
    for step_no in range(2):
        log.plan(a_plan(step_no, step_no))
        log.result(a_result(step_no, 3))
    assert caplog.text.count("the step log ends here") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x05" + bytes(7) + b"hello, a record of version 1", "another version; this Millrace reads and writes"),
        (FIRST_LINE.replace(b"log ", b"log 9"), "another version; this Millrace reads and writes"),
        (b"a letter to somebody, not a log", "is no step log"),
        (b"", "is no step log"),
    ],
)
def test_another_file_is_refused_by_name_when_read_and_when_written(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(BenchError, match=rf"other cannot be read: .*{says}"):
        replay_log(file, RunConfig())
    if content:
        with pytest.raises(ConfigError, match=f"{says}.*Or give --step-log another file"):
            recorder(file)
        assert file.read_bytes() == content


def test_a_log_that_lacks_a_step_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    log = recorder(file)
    log._encoder._sequence = 1  # As if the record before were lost.
    log.plan(a_plan(0, 1))
    log.result(a_result(0, 3))
    with pytest.raises(BenchError, match="step message 1 came where 0 was due"):
        replay_log(file, RunConfig())


class Watched:
    """The bytes of plans and inputs when they were given to the runner, beside the objects themselves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.plans: list[tuple[StepPlan, bytes]] = []
        self.num_inputs = 0
        forward, draw = RecordedRunner.forward, RecordedRunner.draw

        def watched_forward(runner: RecordedRunner, plan: StepPlan) -> None:
            self.plans.append((plan, encode_plan(plan)))
            forward(runner, plan)

        def watched_draw(
            runner: RecordedRunner, plan: StepPlan, inputs: StepInputs | None = None
        ) -> Pending[StepResult]:
            pending = draw(runner, plan, inputs)
            return pending if inputs is None else WatchedDraw(self, pending, inputs)

        patch.setattr(RecordedRunner, "forward", watched_forward)
        patch.setattr(RecordedRunner, "draw", watched_draw)

    def check(self) -> None:
        for plan, before in self.plans:
            assert encode_plan(plan) == before, f"step {plan.step_no} was modified: {plan}"


class WatchedDraw:
    def __init__(self, watched: Watched, pending: Pending[StepResult], inputs: StepInputs) -> None:
        self._watched, self._pending, self._inputs, self._before = watched, pending, inputs, encode_inputs(inputs)

    def wait(self) -> StepResult:
        result = self._pending.wait()
        assert encode_inputs(self._inputs) == self._before, "masks were modified before the draw ended"
        self._watched.num_inputs += 1
        return result

    def done(self) -> bool:
        return self._pending.done()


def test_running_the_steps_again_draws_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # How many drafts there are must not depend on how busy the machine is.
    monkeypatch.setattr(Scheduler, "observe_step", lambda *_: None)
    # Too many requests are admitted, so that blocks run out and requests are preempted.
    monkeypatch.setattr(AdmissionForecast, "admit", lambda *_: True)
    watched, file = Watched(monkeypatch), tmp_path / "steps"
    prompts, params = mixed_requests(VOCAB_SIZE)
    with (
        LLM(tiny_source(tmp_path), dtype="float32", step_log=str(file), **MIXED_SETTINGS) as llm,
        ThreadPoolExecutor(2) as beside,
    ):
        vectors = [beside.submit(llm.embed, prompts[:3], pooling=pooling) for pooling in ("last", "mean")]
        answers = [generation.token_ids for generation in llm.generate(prompts, params)]
        # What a tiny model says repeats nothing: without predictions, only grammars would have drafts.
        predicted = [
            msgspec.structs.replace(one, prediction=tuple(answer))
            for one, answer in zip(params[2:], answers[2:], strict=True)
        ]
        llm.generate(prompts[2:], predicted)
        assert all(len(each.result(300)) == 3 for each in vectors)
    watched.check()
    assert watched.num_inputs > 10
    records = read_log(file)
    plans = [record for record in records if isinstance(record, StepPlan)]
    assert [encode_plan(plan) for plan in plans] == [before for _, before in watched.plans]
    assert {type(record) for record in records} == {RunnerSetup, StepPlan, StepInputs, LoggedResult, BlockCopies}
    inputs = [record for record in records if isinstance(record, StepInputs)]
    found = {
        "drafts of masked steps": sum(len(own) for each in inputs if each.masks for own in each.drafts),
        "drafts of other steps": sum(len(own) for each in inputs if not each.masks for own in each.drafts),
        "preemptions": sum(one.reason == "preempted" for plan in plans for one in plan.released),
        "prefix hits": sum(one.num_computed > 0 for plan in plans for one in plan.admitted),
        "forced tokens": sum(len(one.tokens) for plan in plans for one in plan.appended),
        "loads from the host": sum(isinstance(record, BlockCopies) and record.target == "device" for record in records),
        "scored prompts": sum(plan.scored is not None for plan in plans),
    }
    assert all(found.values()), found

    def propose(*_: object) -> None:
        raise AssertionError("drafts come from the log: only the engine that wrote it proposes")

    monkeypatch.setattr(Drafters, "propose", propose)
    done = replay_log(file, RunConfig())
    assert done.num_different == 0
    assert done.num_tokens > sum(map(len, answers)) / 2
    assert done.num_vectors >= 2
    assert done.vector_error < 1e-5
