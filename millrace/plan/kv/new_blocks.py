"""Blocks that rows were given since the last plan, as the columns of the next one."""

from __future__ import annotations

from array import array

import numpy as np

from millrace.plan.step import Int32s

Columns = tuple[Int32s, Int32s, Int32s]
"""Row, place in the row, and block."""
_NONE = np.zeros(0, np.int32)
_COUNTED = array("i", range(1024))


def _counted(first: int, end: int) -> array[int]:
    return _COUNTED[first:end] if end <= len(_COUNTED) else array("i", range(first, end))


class NewBlocks:
    def __init__(self) -> None:
        self._rows, self._places, self._blocks = array("i"), array("i"), array("i")

    def add(self, row: int, place: int, block: int) -> None:
        self._rows.append(row)
        self._places.append(place)
        self._blocks.append(block)

    def add_each(self, rows: list[int], places: list[int], blocks: list[int]) -> None:
        """One block for each of these rows."""
        self._rows.fromlist(rows)
        self._places.fromlist(places)
        self._blocks.fromlist(blocks)

    def add_many(self, row: int, first: int, blocks: list[int]) -> None:
        """Blocks that follow each other, from the row's place `first` on."""
        self._rows.extend(array("i", (row,)) * len(blocks))
        self._places.extend(_counted(first, first + len(blocks)))
        self._blocks.fromlist(blocks)

    def drop(self, row: int) -> None:
        """The row's were given back."""
        if row in self._rows:
            kept = [entry for entry in zip(self._rows, self._places, self._blocks, strict=True) if entry[0] != row]
            self.clear()
            for entry in kept:
                self.add(*entry)

    def clear(self) -> None:
        self._rows, self._places, self._blocks = array("i"), array("i"), array("i")

    def take(self) -> Columns:
        """All of them; from here on there are none."""
        if not self._rows:
            return _NONE, _NONE, _NONE
        rows, places, blocks = self._rows, self._places, self._blocks
        self.clear()  # their memory belongs to the plan from now on
        return np.frombuffer(rows, np.int32), np.frombuffer(places, np.int32), np.frombuffer(blocks, np.int32)
