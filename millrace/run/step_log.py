"""The step log: every plan with its masks and what it drew, in a file from which the same steps can be run again.

A file begins with a `RunnerSetup`, and has another one for every later start of the engine. A plan that repeats the one
before is written as a difference.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.plan.shapes.table import ShapeFacts
from millrace.plan.step import NO_EPOCH, BlockCopies, CapturePlan, HeadShape, Int32s, Int64s, StepPlan, StepShape
from millrace.run.device.device import Pending
from millrace.run.drafting.drafter import DraftGuide
from millrace.run.runner import AnyRunner, StepResult
from millrace.run.sampling.masks import Masks, Uint32s

log = logging.getLogger(__name__)

HEADER = struct.Struct("<Q")
"""Length of the record that follows."""


class RunnerSetup(msgspec.Struct, frozen=True, tag="setup"):
    """What a runner must be made with to run the steps that follow."""

    model: str
    dtype: str
    quantization: str
    seed: int
    deterministic: bool
    kv_dtype: str
    speculate: str
    num_blocks: int
    block_size: int
    max_rows: int
    max_context: int
    token_budget: int
    host_slots: int
    max_copied: int
    drafter: str = ""


class Planned(msgspec.Struct, frozen=True, tag="plan"):
    plan: StepPlan


class Repeated(msgspec.Struct, frozen=True, tag="repeat"):
    """A plan that repeats the one before: only its number and its block-table updates are new."""

    step_no: int
    block_rows: Int32s
    block_cols: Int32s
    block_ids: Int32s
    block_groups: Int32s | None
    shared_blocks: int
    shape: StepShape
    captures: bool


class Masked(msgspec.Struct, frozen=True, tag="masks"):
    step_no: int
    index: Int64s
    bits: npt.NDArray[np.uint32]
    places: Int64s | None = None
    drafts: list[Int32s] = []
    """Of each masked row of the plan; empty if none has any."""


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    step_no: int
    tokens: Int32s
    counts: Int32s | None


class Captured(msgspec.Struct, frozen=True, tag="capture"):
    shape: StepShape | None = None
    head: HeadShape | None = None


class Copied(msgspec.Struct, frozen=True, tag="copies"):
    copies: BlockCopies


Record = RunnerSetup | Planned | Repeated | Masked | Drawn | Captured | Copied


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} is no part of a step log")


def _decode_array(kind: Any, value: Any) -> Any:
    """`kind` is a type like `Int32s`."""
    if typing.get_origin(kind) is not np.ndarray:
        raise NotImplementedError(f"{kind} is no part of a step log")
    return np.frombuffer(value, typing.get_args(typing.get_args(kind)[1])[0])


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record, dec_hook=_decode_array)


def encode(record: Record) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes) -> Record:
    return _decoder.decode(data)


class StepLog:
    """Writes records. A file that cannot be written ends the log, not the engine."""

    def __init__(self, file: Path, setup: RunnerSetup) -> None:
        self._file: BinaryIO | None = file.open("ab")
        self._last = NO_EPOCH
        self._write(setup)

    def plan(self, plan: StepPlan) -> None:
        repeats, self._last = plan.repeats(self._last), plan.epoch
        if repeats:
            blocks = (plan.block_rows, plan.block_cols, plan.block_ids, plan.block_groups)
            self._write(Repeated(plan.step_no, *blocks, plan.shared_blocks, plan.shape, plan.captures))
        else:
            self._write(Planned(plan))

    def masks(self, plan: StepPlan, masks: Masks, drafts: list[Int32s]) -> None:
        self._write(Masked(plan.step_no, masks.index, masks.bits, masks.places, drafts))

    def capture(self, plan: CapturePlan) -> None:
        part = plan.shape
        self._write(Captured(head=part) if isinstance(part, HeadShape) else Captured(shape=part))

    def copies(self, copies: BlockCopies) -> None:
        self._write(Copied(copies))

    def drawn(self, result: StepResult) -> None:
        self._write(Drawn(result.step_no, result.drawn(), result.counts), flushes=True)

    def _write(self, record: Record, *, flushes: bool = False) -> None:
        if self._file is None:
            return
        data = encode(record)
        try:
            self._file.write(HEADER.pack(len(data)) + data)
            if flushes:
                self._file.flush()
        except OSError:
            log.exception("the step log ends here: its file cannot be written")
            with contextlib.suppress(OSError):  # Closing tries to write again.
                self._file.close()
            self._file = None


class LoggedRunner:
    """A runner whose steps are written to a log."""

    def __init__(self, runner: AnyRunner, steps: StepLog) -> None:
        self._runner, self._steps = runner, steps
        self._drafts: list[Int32s] = []
        """Of the masked rows of the step whose forward pass was queued last."""

    def forward(self, plan: StepPlan) -> None:
        self._drafts = []
        self._steps.plan(plan)
        self._runner.forward(plan)

    def guide_drafts(self, guide: DraftGuide) -> None:
        self._runner.guide_drafts(guide)

    def masked_drafts(self) -> list[Int32s]:
        self._drafts = self._runner.masked_drafts()
        return self._drafts

    def mask_memory(self, count: int) -> Uint32s:
        return self._runner.mask_memory(count)

    def draw(self, plan: StepPlan, masks: Masks | None) -> Pending[StepResult]:
        if masks is not None:
            self._steps.masks(plan, masks, self._drafts)
        return _LoggedDraw(self._runner.draw(plan, masks), self._steps)

    def draw_ahead(self, plan: StepPlan, masks: Masks) -> Pending[StepResult] | None:
        return None  # Masks are recorded with the draw.

    def masks_ready(self) -> None:
        pass

    def copy(self, copies: BlockCopies) -> Pending[float]:
        self._steps.copies(copies)
        return self._runner.copy(copies)

    @property
    def shapes(self) -> ShapeFacts | None:
        return self._runner.shapes

    @property
    def is_built(self) -> bool:
        return self._runner.is_built

    def build_next(self) -> None:
        self._runner.build_next()

    def capture(self, plan: CapturePlan) -> bool:
        self._steps.capture(plan)
        return self._runner.capture(plan)

    def take_missed(self) -> list[HeadShape]:
        return self._runner.take_missed()


class _LoggedDraw:
    def __init__(self, pending: Pending[StepResult], steps: StepLog) -> None:
        self._pending, self._steps = pending, steps

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._steps.drawn(result)
        return result

    def done(self) -> bool:
        return self._pending.done()


def read_log(file: Path) -> Iterator[Record]:
    """The records of the engine's last start, repeated plans made whole. A record cut off at the end is left out."""
    sessions: list[list[Record]] = []
    last: StepPlan | None = None
    for record in _records(file):
        if isinstance(record, RunnerSetup):
            sessions.append([])
        if isinstance(record, Repeated):
            if last is None:
                raise ValueError(f"{file}: step {record.step_no} repeats a step that is not in the log")
            record = Planned(_repeat(last, record))
        if isinstance(record, Planned):
            last = record.plan
        if not sessions:
            raise ValueError(f"{file} does not begin with the setup of a runner; it is no step log")
        sessions[-1].append(record)
    return iter(sessions[-1] if sessions else [])


def _repeat(last: StepPlan, record: Repeated) -> StepPlan:
    return replace(
        last,
        step_no=record.step_no,
        starts=last.starts + 1,
        block_rows=record.block_rows,
        block_cols=record.block_cols,
        block_ids=record.block_ids,
        block_groups=record.block_groups,
        shared_blocks=record.shared_blocks,
        shape=record.shape,
        captures=record.captures,
        scored=None,
        pooled=None,
        admitted=(),
        released=(),
        appended=(),
        forced=(),
    )


def _records(file: Path) -> Iterator[Record]:
    with file.open("rb") as source:
        while len(head := source.read(HEADER.size)) == HEADER.size:
            (length,) = HEADER.unpack(head)
            data = source.read(length)
            if len(data) < length:
                return
            yield decode(data)
