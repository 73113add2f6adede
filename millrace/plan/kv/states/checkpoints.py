"""Checkpoints of recurrent states: where a prefix hit of a hybrid model can begin.

Keys and values exist for every token, a recurrent state only where one was kept. So a prefix hit is the longest that
the KV groups can supply and for which a checkpoint exists. Checkpoints are made where somebody may begin: at the last
block boundary of a prompt, at a branch point (where cached blocks went on and checkpoints did not), and at ends of
chunks while there is room. A row's chunks end there, and the plan says which state is copied where (`StateCopies`).

The tokens of a prefix are compared with those of its blocks (`PrefixIndex`): a checkpoint needs none of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from millrace.plan.kv.states.state_slots import StateSlots
from millrace.plan.request import Request
from millrace.plan.step import StateCopies

HashOf = Callable[[Request, int], bytes]
"""Hash of a block of a request, by its column."""


@dataclass(slots=True)
class _Row:
    request: Request
    begins: int
    """Tokens of the checkpoint that the row begins with; 0 for none."""
    held: bytes | None
    """Its hash, until a plan says so."""
    stops: list[int] = field(default_factory=list)
    """Numbers of tokens at which a chunk must end, ascending: a checkpoint is due there."""
    last: int = 0
    """No checkpoint is made after this number of tokens."""


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    total: int = 0
    used: int = 0
    slot_bytes: int = 0
    hits: int = 0
    evictions: int = 0


class Checkpoints:
    def __init__(self, num_slots: int, block_size: int, slot_bytes: int, hash_of: HashOf) -> None:
        """With no slots every row begins at its first token."""
        self.slots, self._slot_bytes = StateSlots(num_slots), slot_bytes
        self._block_size, self._hash_of = block_size, hash_of
        self._rows: dict[int, _Row] = {}
        self._expected: dict[bytes, int] = {}
        """Hash of each checkpoint that a row will make, to the row."""
        self._saves: list[tuple[int, bytes]] = []
        """(step, hash) of the slots that launched steps write."""
        self.num_hits = 0

    def figures(self) -> CheckpointFigures:
        slots = self.slots
        return CheckpointFigures(slots.total, slots.num_used, self._slot_bytes, self.num_hits, slots.num_evicted)

    # -- matching --------------------------------------------------------------------------------------------------

    def longest(self, request: Request, num_columns: int) -> int:
        """The most columns, up to so many, after which a checkpoint exists. Their hashes are known."""
        while num_columns and not self.slots.has(request.hashes[num_columns - 1]):
            num_columns -= 1
        return num_columns

    def awaited(self, request: Request, first: int, end: int) -> bytes | None:
        """The hash of a checkpoint after more than `first` and at most `end` columns that a row is about to make."""
        if not self._expected:
            return None
        return next((one for one in reversed(request.hashes[first:end]) if one in self._expected), None)

    def is_expected(self, digest: bytes) -> bool:
        return digest in self._expected

    # -- rows ------------------------------------------------------------------------------------------------------

    def seat(self, row: int, request: Request, num_known: int, num_columns: int, num_reached: int) -> None:
        """The row of `num_known` tokens begins with `num_columns` columns, of `num_reached` whose blocks were found."""
        size = self._block_size
        digest = request.hashes[num_columns - 1] if num_columns else None
        if digest is not None:
            self.slots.hold(digest)
            self.num_hits += 1
        last = (num_known - 1) // size * size
        seated = _Row(request, num_columns * size, digest, last=last)
        self._rows[row] = seated
        if self.slots.total:
            seated.stops = sorted({stop for stop in (num_reached * size, last) if seated.begins < stop <= last})
            for stop in seated.stops:
                self._expected.setdefault(self._digest(seated, stop), row)

    def leave(self, row: int) -> None:
        """The row was released."""
        seated = self._rows.pop(row)
        if seated.held is not None:
            self.slots.let_go(seated.held)
        for stop in seated.stops:
            self._forget(row, self._digest(seated, stop))

    def cut(self, row: int, start: int, count: int, known: int) -> int:
        """How many of a chunk's tokens are computed now: it ends at the next stop, or else at the end of a block."""
        seated, end = self._rows[row], start + count
        if not self.slots.total or not count:
            return count
        if start != seated.begins and start in seated.stops:
            return 0  # This step's chunk ended here already: its state is to be kept.
        stop = next((stop for stop in seated.stops if stop > start), known)
        if end >= stop:
            return stop - start
        whole = end // self._block_size * self._block_size
        return whole - start if whole > start and end < known else count

    def rewind(self, row: int, request: Request, num_known: int, confirmed: int) -> int:
        """The states of steps in flight are lost: the number of tokens from which the row is computed again."""
        num_hashed = len(request.hashes) if request.read_cache else 0
        num_columns = self.longest(request, min(confirmed // self._block_size, num_hashed))
        self.leave(row)
        self.seat(row, request, num_known, num_columns, num_columns)
        return num_columns * self._block_size

    # -- plans -----------------------------------------------------------------------------------------------------

    def take(self, step_no: int, announced: Iterable[int], ends: Iterable[tuple[int, int]]) -> StateCopies | None:
        """The copies of a step. `announced`: rows that it announces; `ends`: (row, tokens computed after it) of rows
        with chunks."""
        loads = [self._load(row) for row in announced if self._rows[row].held is not None]
        saves = [save for row, end in ends if (save := self._save(step_no, row, end)) is not None]
        if not loads and not saves:
            return None
        rows, slots, positions = np.array([*loads, *saves], np.int32).T.copy()
        return StateCopies(rows, slots, positions, len(loads))

    def _load(self, row: int) -> tuple[int, int, int]:
        seated = self._rows[row]
        assert seated.held is not None
        slot = self.slots.hold(seated.held)
        for _ in range(2):  # This call's and the row's.
            self.slots.let_go(seated.held)
        seated.held = None
        return row, slot, seated.begins

    def _save(self, step_no: int, row: int, end: int) -> tuple[int, int, int] | None:
        seated = self._rows[row]
        if end % self._block_size or not seated.begins < end <= seated.last:
            return None
        digest, is_stop = self._digest(seated, end), end in seated.stops
        if is_stop:
            seated.stops.remove(end)
            self._forget(row, digest)
        slot = self.slots.fill(digest, seated.request.id, is_minor=not is_stop)
        if slot is None:
            return None
        self._saves.append((step_no, digest))
        # Others may wait until the step has completed.
        self._expected.setdefault(digest, row)
        return row, slot, end

    def complete(self, step_no: int) -> None:
        """Step `step_no` and all before it have completed."""
        while self._saves and self._saves[0][0] <= step_no:
            _, digest = self._saves.pop(0)
            self.slots.filled(digest)
            self._expected.pop(digest, None)

    def discard(self) -> None:
        """All steps in flight have failed."""
        for _, digest in self._saves:
            self._expected.pop(digest, None)
        self._saves.clear()
        self.slots.discard_filling()

    def _forget(self, row: int, digest: bytes) -> None:
        if self._expected.get(digest) == row and all(digest != saved for _, saved in self._saves):
            del self._expected[digest]

    def _digest(self, seated: _Row, num_tokens: int) -> bytes:
        return self._hash_of(seated.request, num_tokens // self._block_size - 1)
