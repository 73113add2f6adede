"""Places for drafts: how many tokens beyond its own each decoding row may verify in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.seating import Seating
from millrace.plan.step import Int32s, Int64s


@dataclass(frozen=True, slots=True)
class DraftSettings:
    max_drafts: int = 0
    """Drafts of one row in one step; 0 turns drafting off."""
    max_places: int = 1 << 30
    """Tokens that a step may verify in all, each row's own included."""


class DraftPlaces:
    def __init__(self, settings: DraftSettings, seating: Seating) -> None:
        self._settings, self._seating, self._rows = settings, seating, seating.rows

    def take(self, singles: Int64s) -> Int32s | None:
        """Places for the drafts of each row, with the blocks for them; None if no row gets any.

        Drafts are optional: rows go without when blocks are short or when the step would verify too many tokens.
        """
        places = self._wanted(singles)
        if places is not None and not self._take_blocks(singles, places):
            places = None
        if places is None and self._rows.slack[singles].any():
            # Steps in flight verify drafts of these rows: only the device knows where this step begins.
            return np.zeros(len(singles), np.int32)
        return places

    def _wanted(self, singles: Int64s) -> Int32s | None:
        settings, rows = self._settings, self._rows
        per_row = min(settings.max_drafts, settings.max_places // max(1, len(singles)) - 1)
        if per_row <= 0 or len(singles) == 0:
            return None
        # The last token that the limit allows needs no draft before it.
        left = rows.limit[singles] - rows.known[singles] - 1
        places: Int32s = np.where(rows.can_draft[singles], np.clip(left, 0, per_row), 0).astype(np.int32)
        return places if places.any() else None

    def _take_blocks(self, singles: Int64s, places: Int32s) -> bool:
        """Take blocks for the most that the rows can reach. False, with nothing taken, if there are not enough."""
        rows, size = self._rows, self._rows.block_size
        most = rows.computed[singles] + rows.slack[singles] + 1 + places
        columns = -(-np.minimum(most, rows.limit[singles]) // size) - rows.num_blocks[singles]
        if int(np.maximum(columns, 0).sum()) > self._seating.num_available_columns:
            return False
        for at in np.flatnonzero(columns > 0).tolist():
            self._seating.grow(int(singles[at]), int(columns[at]))
        return True
