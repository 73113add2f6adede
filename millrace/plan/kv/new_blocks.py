"""Block-table updates since the last plan, collected as the columns of the next one."""

from __future__ import annotations

from array import array

import numpy as np

from millrace.plan.step import Int32s

Columns = tuple[Int32s, Int32s, Int32s, Int32s]
"""KV group, row, column in the block table, and block id of each update."""
_NONE = np.zeros(0, np.int32)
_RANGE = array("i", range(1024))


def _range(first: int, end: int) -> array[int]:
    return _RANGE[first:end] if end <= len(_RANGE) else array("i", range(first, end))


class NewBlocks:
    def __init__(self, num_groups: int = 1) -> None:
        self._has_groups = num_groups > 1
        """False leaves out the KV group, which is 0."""
        self._groups, self._rows, self._columns, self._blocks = array("i"), array("i"), array("i"), array("i")

    def add_each(self, group: int, rows: list[int], columns: list[int], blocks: list[int]) -> None:
        """One block per row."""
        if self._has_groups:
            self._groups.extend(array("i", (group,)) * len(rows))
        self._rows.fromlist(rows)
        self._columns.fromlist(columns)
        self._blocks.fromlist(blocks)

    def add_many(self, group: int, row: int, first: int, blocks: list[int]) -> None:
        """Consecutive blocks of one row, from column `first` on."""
        if self._has_groups:
            self._groups.extend(array("i", (group,)) * len(blocks))
        self._rows.extend(array("i", (row,)) * len(blocks))
        self._columns.extend(_range(first, first + len(blocks)))
        self._blocks.fromlist(blocks)

    def drop(self, row: int) -> None:
        """Remove the updates of a released row."""
        if row in self._rows:
            kept = [at for at, other in enumerate(self._rows) if other != row]
            self._rows, self._columns, self._blocks = (
                array("i", [column[at] for at in kept]) for column in (self._rows, self._columns, self._blocks)
            )
            if self._has_groups:
                self._groups = array("i", [self._groups[at] for at in kept])

    def clear(self) -> None:
        self._groups, self._rows, self._columns, self._blocks = array("i"), array("i"), array("i"), array("i")

    def take(self) -> Columns:
        """Return all updates and clear them. The groups are empty if there is only one."""
        if not self._rows:
            return _NONE, _NONE, _NONE, _NONE
        groups, rows, columns, blocks = self._groups, self._rows, self._columns, self._blocks
        self.clear()  # The returned views keep the memory of these arrays.
        taken = (np.frombuffer(rows, np.int32), np.frombuffer(columns, np.int32), np.frombuffer(blocks, np.int32))
        return np.frombuffer(groups, np.int32) if self._has_groups else _NONE, *taken
