"""Seats requests in table rows: gives them blocks, announces them to the runner and takes both back.

What the runner has to be told (admissions, releases, new blocks) is collected here until the next plan carries it.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection

import numpy as np

from millrace.plan.documents.placing import PlacedDocuments, Span
from millrace.plan.in_flight import StepsInFlight
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.new_blocks import Columns, NewBlocks
from millrace.plan.kv.prefix import Match, PrefixIndex
from millrace.plan.kv.states.checkpoints import Checkpoints
from millrace.plan.request import Request
from millrace.plan.rows.rows import Rows
from millrace.plan.step import Admission, Appended, Int32s, Int64s, Release, ReleaseReason


class Seating:
    def __init__(
        self, rows: Rows, pool: BlockPool, prefix: PrefixIndex, groups: KvGroups, in_flight: StepsInFlight
    ) -> None:
        self.checkpoints = prefix.checkpoints
        self.rows, self.pool, self.prefix, self.groups = rows, pool, prefix, groups
        self._in_flight = in_flight
        self._num_groups, self._block_size = groups.num_groups, rows.block_size
        self._windowed = groups.windowed
        self.documents = PlacedDocuments(rows, pool, prefix, in_flight)
        self.most_blocks = 0
        """Upper bound on the blocks of the seated requests, whatever they generate."""
        self.num_recomputed = 0
        """Tokens computed again after a preemption, or for a request of another engine."""
        self._row_of: dict[int, int] = {}
        self._unannounced: set[int] = set()
        """Admitted rows that no plan has announced to the runner yet."""
        self._releases: list[Release] = []
        self._new_blocks = NewBlocks(groups.num_groups)
        """Blocks of announced rows that no plan has carried yet."""
        self._appended: list[Appended] = []

    def __len__(self) -> int:
        return len(self._row_of)

    def row_of(self, request_id: int) -> int | None:
        return self._row_of.get(request_id)

    @property
    def has_unannounced(self) -> bool:
        return bool(self._unannounced)

    @property
    def num_available_columns(self) -> int:
        """Columns of block tables that the available blocks can fill: one block per group each."""
        return self.pool.num_available // self._num_groups

    def why_it_never_fits(self, request: Request) -> str:
        """Empty if it fits when it is alone."""
        size, total = self._block_size, self.pool.total
        needed = self.groups.blocks_for(request.limit, size)
        if needed <= total:
            return ""
        return (
            f"The request may need {request.limit} tokens ({needed} KV blocks of {size} tokens);"
            f" the KV pool has {total} blocks. Lower max_tokens or enlarge the KV pool."
        )

    def admit(self, request: Request, match: Match, spans: list[Span]) -> int:
        """`spans`: of documents, not to be computed."""
        self.pool.share(match.found)
        request.exact_end = spans[0].start if spans else sys.maxsize
        self.prefix.count(request, match.num_columns)
        self.prefix.expect(request, match.num_columns)
        request.held_by, request.loads, request.returns = None, 0, 0
        self.num_recomputed += max(0, request.num_computed - match.num_columns * self._block_size)
        num_columns, num_reached = match.num_columns, match.num_reached
        row = self.rows.admit(request, match.blocks)
        self.most_blocks += self.blocks_at_limit(request)
        self._row_of[request.id] = row
        self._unannounced.add(row)
        if self.checkpoints is not None:
            self.checkpoints.seat(row, request, int(self.rows.known[row]), num_columns, num_reached)
        if spans:
            self.documents.seat(row, spans)
            self.grow(row, -(-spans[-1].end // self._block_size) - num_columns)
        return row

    def release(self, row: int, reason: ReleaseReason) -> Request:
        """Empty the row. Its blocks are registered in the prefix cache first, as far as they are confirmed."""
        num_computed = int(self.rows.confirmed[row])
        self.register_blocks(row, num_computed // self._block_size)
        fence = self._in_flight.fence
        if self.checkpoints is not None:
            self.checkpoints.leave(row)
        self.documents.leave(row)
        request, groups = self.rows.release(row, fence)
        request.num_computed = num_computed
        if self.rows.num_registered[row] < self.rows.num_full_at_admission[row]:  # Else nobody waits for its blocks.
            self.prefix.forget(request)
        self.most_blocks -= self.blocks_at_limit(request)
        for blocks in groups:
            blocks.reverse()
            self.pool.release([block for block in blocks if block] if self._windowed else blocks, fence)
        del self._row_of[request.id]
        if row in self._unannounced:
            self._unannounced.discard(row)
        else:
            self._new_blocks.drop(row)
            if self._appended:
                self._appended = [appended for appended in self._appended if appended.row != row]
            self._releases.append(Release(row, request.id, reason))
        return request

    def blocks_at_limit(self, request: Request) -> int:
        """Upper bound on the blocks that the request holds at once."""
        return -(-request.limit // self._block_size) * self._num_groups

    # -- blocks ----------------------------------------------------------------------------------------------------

    def grow_by_one(self, crossing: Int64s) -> None:
        """One more column for each of these rows. The only per-row Python work of a repeated decode step."""
        held, blocks_of, unannounced = self.rows.num_blocks[crossing], self.rows.blocks, self._unannounced
        rows, columns = crossing.tolist(), held.tolist()
        known = [at for at, row in enumerate(rows) if row not in unannounced] if unannounced else None
        for group in range(self._num_groups):
            taken = self.pool.take_many(len(rows))
            for row, block in zip(rows, taken, strict=True):
                blocks_of[row][group].append(block)
            if known is None:
                self._new_blocks.add_each(group, rows, columns, taken)
            else:
                told = ([column[at] for at in known] for column in (rows, columns, taken))
                self._new_blocks.add_each(group, *told)
        self.rows.num_blocks[crossing] = held + 1

    def grow_ahead(self, crossing: Int64s) -> None:
        """One more column for each of these rows, which may come several times: `grow_by_one` for several steps."""
        held = self.rows.num_blocks
        for row, block in zip(crossing.tolist(), self.pool.take_many(len(crossing)), strict=True):
            self.rows.blocks[row][0].append(block)
            self._new_blocks.add_many(0, row, int(held[row]), [block])
            held[row] += 1

    def grow(self, row: int, num_columns: int) -> None:
        """Give the row this many columns more."""
        if num_columns <= 0:
            return
        for group, blocks in enumerate(self.rows.blocks[row]):
            taken = self.pool.take_many(num_columns)
            if row not in self._unannounced:
                self._new_blocks.add_many(group, row, len(blocks), taken)
            blocks += taken
        self.rows.num_blocks[row] += num_columns

    def shared_blocks(self, row: int) -> int:
        """Number of this row's leading blocks that every running row shares, in every group without a window.

        A shared block has the same column in every row, and reference counts never grow along a row, so a binary
        search finds the last block that all rows reference.
        """
        num_running, shared = len(self._row_of), 0
        if num_running < 2:
            return 0
        for group in range(self.groups.num_full):
            blocks = self.rows.blocks[row][group]
            if not blocks or self.pool.num_refs(blocks[0]) < num_running:
                return 0
            own = bisect_left(blocks, True, key=lambda block: self.pool.num_refs(block) < num_running)
            shared = min(shared, own) if group else own
        return shared

    def register_blocks(self, row: int, num_full: int) -> None:
        """Register the row's blocks below column `num_full` in the prefix cache."""
        first = int(self.rows.num_registered[row])
        num_full = min(num_full, self.rows.request(row).exact_end // self._block_size)
        if num_full <= first:
            return
        self.rows.fold(row)
        blocks = [ids[first:num_full] for ids in self.rows.blocks[row]]
        self.prefix.register_blocks(self.rows.request(row), first, blocks)
        self.rows.num_registered[row] = num_full

    def register_admitted_blocks(self, computed_rows: Int64s) -> None:
        """Register full blocks of tokens known at admission: other requests may wait for them.

        Blocks of generated tokens are registered when their row is released, so decode steps do not pay for it.
        """
        rows = self.rows
        full = np.minimum(rows.confirmed[computed_rows] // self._block_size, rows.num_full_at_admission[computed_rows])
        for index in np.flatnonzero(full > rows.num_registered[computed_rows]).tolist():
            self.register_blocks(int(computed_rows[index]), int(full[index]))

    def free_behind_windows(self, computed_rows: Int64s) -> None:
        """Free the blocks that no token after the confirmed ones can see."""
        rows, size = self.rows, self._block_size
        for group, window in self._windowed:
            visible = np.maximum(rows.confirmed[computed_rows] - (window - 1), 0) // size
            behind = np.flatnonzero(visible > rows.num_dropped[group, computed_rows])
            for index in behind.tolist():
                self._drop_columns(int(computed_rows[index]), group, int(visible[index]))

    def _drop_columns(self, row: int, group: int, end: int) -> None:
        self.register_blocks(row, end)
        first, blocks = int(self.rows.num_dropped[group, row]), self.rows.blocks[row][group]
        self.pool.release([block for block in blocks[first:end] if block], self._in_flight.fence)
        blocks[first:end] = [0] * (end - first)
        self.rows.num_dropped[group, row] = end

    # -- what the runner has to be told ----------------------------------------------------------------------------

    def take_admissions(self, chunks: Collection[int], singles: Int64s) -> tuple[Admission, ...]:
        """Announce the rows of the next plan that the runner does not know yet, with all their blocks."""
        admissions = []
        told = {row for row in self._unannounced if row in chunks}
        if len(told) < len(self._unannounced):
            told |= self._unannounced.intersection(singles.tolist())
        self._unannounced -= told
        for row in sorted(told):
            request = self.rows.request(row)
            for group, blocks in enumerate(self.rows.blocks[row]):
                first = int(self.rows.num_dropped[group, row])
                self._new_blocks.add_many(group, row, first, blocks[first:])
            admissions.append(
                Admission(
                    row=row,
                    request_id=request.id,
                    tokens=self.rows.tokens(row),
                    num_prompt=request.num_prompt,
                    row_params=request.row_params,
                    limit=request.limit,
                    num_computed=int(self.rows.confirmed[row]),
                    adapter=request.adapter,
                )
            )
        return tuple(admissions)

    def take_releases(self) -> tuple[Release, ...]:
        releases = tuple(self._releases)
        self._releases.clear()
        return releases

    def take_new_blocks(self) -> Columns:
        return self._new_blocks.take()

    def append(self, row: int, forced: Int32s) -> None:
        """These tokens follow the confirmed ones. The first is drawn by the only step in flight that has the row."""
        self._appended.append(Appended(row, int(self.rows.known_host[row]), forced))
        self.rows.extend(row, forced[1:])

    def take_appended(self) -> tuple[Appended, ...]:
        appended = tuple(self._appended)
        self._appended.clear()
        return appended

    def announce_all_again(self) -> None:
        """The runner's table is lost: the next plans announce every row."""
        self._unannounced = set(self._row_of.values())
        if self.checkpoints is not None:
            self._rewind_states(self.checkpoints)
        self._new_blocks.clear()
        self._appended.clear()
        self._releases.clear()

    def _rewind_states(self, checkpoints: Checkpoints) -> None:
        """The rows' recurrent states are lost with the table: each is computed again from a checkpoint, or from its
        first token, in the blocks that it has."""
        checkpoints.discard()
        rows = self.rows
        for row in self._row_of.values():
            rows.fold(row)  # The checkpoints' hashes are of tokens in the history.
            progress = int(rows.known_host[row]), int(rows.confirmed[row])
            rows.confirmed[row] = rows.computed[row] = checkpoints.rewind(row, rows.request(row), *progress)
