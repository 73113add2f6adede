"""The step log: every plan with its masks and what it drew, in a file from which the same steps can be run again.

A file begins with a line that names its version. Then come records: a `RunnerSetup` for every start of the engine, and
after it the engine's step messages, as `plan/codec` writes them, with the results of the steps.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.plan.codec.decoder import StepDecoder
from millrace.plan.codec.encoder import StepEncoder
from millrace.plan.codec.layout import VERSION, StepMessage
from millrace.plan.shapes.table import ShapeFacts
from millrace.plan.step import BlockCopies, CapturePlan, HeadShape, Int32s, StepInputs, StepPlan
from millrace.run.device.device import Pending
from millrace.run.runner import AnyRunner, StepResult
from millrace.run.sampling.masks import Uint32s

log = logging.getLogger(__name__)

Float32s = npt.NDArray[np.float32]

FIRST_LINE = b"millrace step log %d\n" % VERSION
RECORD = struct.Struct("<BxxxI")
"""Kind and length of the record that follows."""
SETUP, STEP, RESULT = range(3)


class RunnerSetup(msgspec.Struct, frozen=True):
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


class LoggedResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave."""

    step_no: int
    tokens: bytes
    """int32"""
    vectors: bytes = b""
    """float32: those of pooled rows, one after the other."""


Record = RunnerSetup | StepMessage | LoggedResult

_result_decoder = msgspec.msgpack.Decoder(LoggedResult)


class StepLog:
    """Writes records. A file that cannot be written ends the log, not the engine."""

    def __init__(self, file: Path, setup: RunnerSetup) -> None:
        self._file: BinaryIO | None = _open_for_more(file)
        self._encoder = StepEncoder()
        self._write(SETUP, lambda: msgspec.msgpack.encode(setup))

    def plan(self, plan: StepPlan) -> None:
        self._write(STEP, lambda: self._encoder.plan(plan))

    def inputs(self, inputs: StepInputs) -> None:
        self._write(STEP, lambda: self._encoder.inputs(inputs))

    def capture(self, plan: CapturePlan) -> None:
        self._write(STEP, lambda: self._encoder.capture(plan))

    def copies(self, copies: BlockCopies) -> None:
        self._write(STEP, lambda: self._encoder.copies(copies))

    def result(self, result: StepResult) -> None:
        logged = LoggedResult(result.step_no, result.drawn().tobytes(), vectors_of(result).tobytes())
        self._write(RESULT, lambda: msgspec.msgpack.encode(logged), flushes=True)

    def _write(self, kind: int, encode: Callable[[], bytes], *, flushes: bool = False) -> None:
        if self._file is None:
            return
        data = encode()
        try:
            self._file.write(RECORD.pack(kind, len(data)) + data)
            if flushes:
                self._file.flush()
        except OSError:
            log.exception("the step log ends here: its file cannot be written")
            with contextlib.suppress(OSError):  # Closing tries to write again.
                self._file.close()
            self._file = None


def vectors_of(result: StepResult) -> Float32s:
    """Of the step's pooled rows, one after the other."""
    return np.concatenate([np.zeros(0, np.float32), *(part.vector.numpy() for part in result.pooled)])


def _open_for_more(file: Path) -> BinaryIO:
    """Records are added to a log of this version. What an earlier engine did not write whole is removed."""
    if not file.is_file() or not file.stat().st_size:
        opened = file.open("ab")
        opened.write(FIRST_LINE)
        return opened
    with file.open("r+b") as existing:
        try:
            _check_first_line(existing, file)
        except ValueError as error:
            raise ConfigError(f"{error} Or give --step-log another file.", param="step_log") from error
        end = len(FIRST_LINE) + sum(RECORD.size + len(data) for _, data in _records(existing))
        existing.truncate(end)
    return file.open("ab")


class LoggedRunner:
    """A runner whose steps are written to a log."""

    def __init__(self, runner: AnyRunner, steps: StepLog) -> None:
        self._runner, self._steps = runner, steps

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        self._steps.plan(plan)
        self._runner.forward(plan, given)

    def drafts(self) -> tuple[Int32s, ...]:
        return self._runner.drafts()

    def mask_memory(self, count: int) -> Uint32s:
        return self._runner.mask_memory(count)

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Pending[StepResult]:
        if inputs is not None:
            self._steps.inputs(inputs)
        return _LoggedDraw(self._runner.draw(plan, inputs), self._steps, has_inputs=inputs is not None)

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> Pending[StepResult] | None:
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
    def __init__(self, pending: Pending[StepResult], steps: StepLog, *, has_inputs: bool) -> None:
        self._pending, self._steps, self._has_inputs = pending, steps, has_inputs

    def wait(self) -> StepResult:
        result = self._pending.wait()
        if result.proposed and not self._has_inputs:  # Without masks the host learns them with the tokens.
            self._steps.inputs(StepInputs(result.step_no, drafts=result.proposed))
        self._steps.result(result)
        return result

    def done(self) -> bool:
        return self._pending.done()


def read_log(file: Path) -> list[Record]:
    """The records of the engine's last start. A record cut off at the end is left out. Raises a ValueError."""
    found: list[Record] = []
    decoder = StepDecoder()
    with file.open("rb") as source:
        _check_first_line(source, file)
        for kind, data in _records(source):
            if kind == SETUP:
                found, decoder = [msgspec.msgpack.decode(data, type=RunnerSetup)], StepDecoder()
            elif kind == STEP:
                found.append(decoder.decode(data))
            elif kind == RESULT:
                found.append(_result_decoder.decode(data))
            else:
                raise ValueError(f"{file} has a record of the unknown kind {kind}; it is damaged.")
    return found


def _check_first_line(source: BinaryIO, file: Path) -> None:
    line = source.read(len(FIRST_LINE))
    if line == FIRST_LINE:
        return
    name = FIRST_LINE[: FIRST_LINE.rindex(b" ") + 1]
    # Version 1 had no such line: it began with the length of a record, 8 bytes.
    if line.startswith(name) or (line[3:8] == bytes(5) and line[:3] != bytes(3)):
        raise ValueError(
            f"{file} is a step log of another version; this Millrace reads and writes version {VERSION}. Record the"
            " steps again."
        )
    raise ValueError(f"{file} is no step log.")


def _records(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each record that was written whole."""
    while len(head := source.read(RECORD.size)) == RECORD.size:
        kind, length = RECORD.unpack(head)
        data = source.read(length)
        if len(data) < length:
            return
        yield kind, data
