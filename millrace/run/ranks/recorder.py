"""Records of what rank 0 does: every plan with its inputs and what it drew, as bytes from which other ranks, the mirror
and replay run the same steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.models.adapters.files import Packed
from millrace.plan.codec.decoder import StepDecoder
from millrace.plan.codec.encoder import StepEncoder
from millrace.plan.codec.layout import StepMessage
from millrace.plan.shapes.declared import DeclaredShapes
from millrace.plan.step import BlockCopies, CapturePlan, Int32s, StepInputs, StepPlan, Uint32s
from millrace.run.device.device import Pending
from millrace.run.protocol import AnyRunner, StepResult

Float32s = npt.NDArray[np.float32]

SETUP, STEP, RESULT, SLOT, PIECE, DISK = range(6)
"""Kinds of records."""


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
    graphs: bool = True
    state_places: int = 1
    state_slots: int = 0
    adapter_slots: int = 0
    all_states: bool = False
    disk: str = ""
    """Identity of the blocks on a disk; `disk_slots`: how many it holds. 0: there is none."""
    disk_slots: int = 0
    shapes: str = ""
    """Digest of the shapes that its runner declared. In a step log; ranks tell theirs when they are ready."""


class SlotFill(msgspec.Struct, frozen=True, array_like=True):
    """Later steps find this adapter in the slot."""

    slot: int
    folder: str
    """Empty: the slot is emptied."""
    digest: str


class SlotPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of the matrices that a slot gets. Steps after the last one find them there."""

    slot: int
    data: bytes = b""
    is_last: bool = False
    packed: Packed | None = None
    """What all pieces hold, with the last one. None: the slot is emptied."""


DiskWorkKind = Literal["write", "read", "forget"]


class DiskWork(msgspec.Struct, frozen=True, array_like=True):
    """Every rank does this with its own share of the blocks on a disk."""

    number: int
    kind: DiskWorkKind
    slots: list[int]
    """On the disk."""
    places: list[int]
    """In host memory."""
    names: tuple[bytes, ...]
    """Of the blocks. To forget: the mark of their owner."""


class LoggedResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave."""

    step_no: int
    tokens: bytes
    """int32"""
    vectors: bytes = b""
    """float32: those of pooled rows, one after the other."""


Record = RunnerSetup | StepMessage | LoggedResult | SlotFill | SlotPiece | DiskWork

_setup_decoder = msgspec.msgpack.Decoder(RunnerSetup)
_slot_decoder = msgspec.msgpack.Decoder(SlotFill)
_piece_decoder = msgspec.msgpack.Decoder(SlotPiece)
_disk_decoder = msgspec.msgpack.Decoder(DiskWork)
_result_decoder = msgspec.msgpack.Decoder(LoggedResult)


def vectors_of(result: StepResult) -> Float32s:
    """Of the step's pooled rows, one after the other."""
    return np.concatenate([np.zeros(0, np.float32), *(part.vector.numpy() for part in result.pooled)])


class RecordSink(Protocol):
    def write(self, kind: int, data: bytes) -> None:
        """One record. Nothing that happens here may fail the step."""


class StepRecorder:
    """Writes the records of one start of the engine to a sink."""

    def __init__(self, sink: RecordSink, setup: RunnerSetup) -> None:
        self._sink = sink
        self._encoder = StepEncoder()
        self._lock = threading.Lock()
        """Messages are numbered, and drafts may come from the device's thread."""
        sink.write(SETUP, msgspec.msgpack.encode(setup))

    def plan(self, plan: StepPlan) -> None:
        with self._lock:
            self._sink.write(STEP, self._encoder.plan(plan))

    def inputs(self, inputs: StepInputs) -> None:
        with self._lock:
            self._sink.write(STEP, self._encoder.inputs(inputs))

    def capture(self, plan: CapturePlan) -> None:
        with self._lock:
            self._sink.write(STEP, self._encoder.capture(plan))

    def copies(self, copies: BlockCopies) -> None:
        with self._lock:
            self._sink.write(STEP, self._encoder.copies(copies))

    def slot(self, fill: SlotFill) -> None:
        with self._lock:
            self._sink.write(SLOT, msgspec.msgpack.encode(fill))

    def slot_piece(self, piece: SlotPiece) -> None:
        with self._lock:
            self._sink.write(PIECE, msgspec.msgpack.encode(piece))

    def disk(self, work: DiskWork) -> None:
        with self._lock:
            self._sink.write(DISK, msgspec.msgpack.encode(work))

    def result(self, result: StepResult) -> None:
        logged = LoggedResult(result.step_no, result.drawn().tobytes(), vectors_of(result).tobytes())
        with self._lock:
            self._sink.write(RESULT, msgspec.msgpack.encode(logged))


class RecordReader:
    """Reads the records of a recorder, in order."""

    def __init__(self) -> None:
        self._decoder = StepDecoder()

    def read(self, kind: int, data: bytes) -> Record:
        """Raises a ValueError."""
        if kind == SETUP:
            self._decoder = StepDecoder()
            return _setup_decoder.decode(data)
        if kind == STEP:
            return self._decoder.decode(data)
        if kind == PIECE:
            return _piece_decoder.decode(data)
        if kind == SLOT:
            return _slot_decoder.decode(data)
        if kind == DISK:
            return _disk_decoder.decode(data)
        if kind == RESULT:
            return _result_decoder.decode(data)
        raise ValueError(f"a record has the unknown kind {kind}")


class RecordedRunner:
    """A runner whose steps are recorded."""

    def __init__(self, runner: AnyRunner, steps: StepRecorder) -> None:
        self._runner = runner
        self._steps = steps
        self._waiting: StepInputs | None = None
        """Of a draw that waits for its masks: they are recorded when they are there."""
        self._num_draws = 0
        self._num_discarded = 0
        """Draws up to the last one that was queued when a step failed."""

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
        return self._recorded(self._runner.draw(plan, inputs), has_inputs=inputs is not None)

    def _recorded(self, pending: Pending[StepResult], *, has_inputs: bool) -> Pending[StepResult]:
        self._num_draws += 1
        return _RecordedDraw(pending, partial(self._wait, pending, self._num_draws, has_inputs))

    def _wait(self, pending: Pending[StepResult], number: int, has_inputs: bool) -> StepResult:
        """Steps queued behind one that fails are discarded, whatever they give: nobody is to compare that."""
        try:
            result = pending.wait()
        except Exception:
            self._num_discarded = self._num_draws
            raise
        if number <= self._num_discarded:
            return result
        if result.proposed and not has_inputs:  # Without masks the host learns them with the tokens.
            self._steps.inputs(StepInputs(result.step_no, drafts=result.proposed))
        self._steps.result(result)
        return result

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> Pending[StepResult] | None:
        pending = self._runner.draw_ahead(plan, inputs)
        if pending is None:
            return None
        self._waiting = inputs
        return self._recorded(pending, has_inputs=True)

    def masks_ready(self) -> None:
        inputs, self._waiting = self._waiting, None
        if inputs is not None:
            self._steps.inputs(inputs)
        self._runner.masks_ready()

    def copy(self, copies: BlockCopies) -> Pending[float]:
        self._steps.copies(copies)
        return self._runner.copy(copies)

    @property
    def shapes(self) -> DeclaredShapes:
        return self._runner.shapes

    @property
    def is_built(self) -> bool:
        return self._runner.is_built

    def build_next(self) -> None:
        self._runner.build_next()

    def capture(self, plan: CapturePlan) -> bool:
        self._steps.capture(plan)
        return self._runner.capture(plan)


class _RecordedDraw:
    def __init__(self, pending: Pending[StepResult], wait: Callable[[], StepResult]) -> None:
        self._pending = pending
        self.wait = wait

    def done(self) -> bool:
        return self._pending.done()


@dataclass(frozen=True, slots=True)
class Checked:
    """A draw that gives nothing if what it gave may be wrong."""

    pending: Pending[StepResult]
    check: Callable[[], None]

    def wait(self) -> StepResult:
        result = self.pending.wait()
        self.check()
        return result

    def done(self) -> bool:
        return self.pending.done()


def capture(runner: AnyRunner, plan: CapturePlan) -> bool:
    """On one of several ranks. They sum while a graph is prepared, so either all have it or none."""
    if not runner.capture(plan):
        raise RuntimeError("a CUDA graph could not be captured, and ranks capture together; set --no-graphs")
    return True


class RankedRunner(RecordedRunner):
    """Rank 0 of several: the others run every step at the same time, so they are told of everything as soon as it is
    known. A runner that drafts on the host tells its drafts itself, see `Runner`."""

    def __init__(self, runner: AnyRunner, steps: StepRecorder, check: Callable[[], None] = lambda: None) -> None:
        """`check`: raises if what a step gave may be wrong."""
        super().__init__(runner, steps)
        self._check = check

    def _wait(self, pending: Pending[StepResult], number: int, has_inputs: bool) -> StepResult:
        return super()._wait(Checked(pending, self._check), number, has_inputs)

    def capture(self, plan: CapturePlan) -> bool:
        self._steps.capture(plan)
        return capture(self._runner, plan)

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> Pending[StepResult]:
        if plan.masked is not None:
            if plan.draft_places is not None:
                self._runner.drafts()  # They are told before the masks.
            self._steps.inputs(inputs or StepInputs(plan.step_no))
        return self._recorded(self._runner.draw(plan, inputs), has_inputs=True)
