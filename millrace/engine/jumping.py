"""Whether steps wait for the tokens that grammars force.

A step that begins after forced tokens can be planned only when the masks of the step before are known, and on a GPU it
is a mixed step, which takes longer than a decode step. With few rows that always pays. With many it pays while a good
part of them is between the free parts of their answers, so it is tried then, and kept up while it saves enough.
"""

from __future__ import annotations

import sys

TRIED_STEPS = 16
"""After these it is decided whether to go on."""
MIN_SAVED = 0.25
"""Draws saved per row and step that are worth the longer steps."""
MIN_FORCED = 0.25
"""Share of rows with a forced token from which it is tried."""
LOOK_EVERY = 8
"""Steps between two looks at the share of forced rows."""
FIRST_REST, LONGEST_REST = 64, 1024
"""Steps after an attempt that did not pay."""


class Jumping:
    def __init__(self, always_rows: int = sys.maxsize) -> None:
        """Steps of up to `always_rows` rows always wait."""
        self._always_rows = always_rows
        self._tried = 0
        """Steps left of an attempt."""
        self._num_saved = self._num_rows = 0
        """In this attempt."""
        self._resting, self._rest = 0, FIRST_REST
        self._until_look = LOOK_EVERY

    def waits(self, num_rows: int) -> bool:
        return num_rows <= self._always_rows or self._tried > 0

    def saw_step(self, num_saved: int, num_rows: int) -> None:
        """A step that waited saved so many draws."""
        if num_rows <= self._always_rows:
            return
        self._tried -= 1
        self._num_saved += num_saved
        self._num_rows += num_rows
        if self._tried:
            return
        if self._num_saved >= MIN_SAVED * self._num_rows:
            self._rest = FIRST_REST
            self._begin()
        else:
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)

    def looks(self) -> bool:
        """To be called once for each step that did not wait. True: `saw_forced` wants to know of it."""
        if self._resting:
            self._resting -= 1
            return False
        self._until_look -= 1
        if self._until_look:
            return False
        self._until_look = LOOK_EVERY
        return True

    def saw_forced(self, num_forced: int, num_rows: int) -> None:
        if num_forced >= MIN_FORCED * num_rows:
            self._begin()

    def _begin(self) -> None:
        self._tried, self._num_saved, self._num_rows = TRIED_STEPS, 0, 0
