"""The blocks of a prefix that leave for another replica, or come from one.

A prefix is named by its tokens and its salt; its hashes follow from them. Blocks that come are allocated and held,
filled by the caller, and then found by requests as any other cached block.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.params.keeping import Retain
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.groups import KvGroups, first_visible_column
from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.kv.retention import Handle, Retention
from millrace.plan.request import Request


class PrefixTransfer:
    def __init__(self, pool: BlockPool, prefix: PrefixIndex, retention: Retention, groups: KvGroups) -> None:
        self._pool, self._prefix, self._retention, self._groups = pool, prefix, retention, groups

    @property
    def num_groups(self) -> int:
        return self._groups.num_groups

    def handle(self, name: str, owner: str, now: float) -> Handle | None:
        return self._retention.find(name, owner, now)

    def keep(self, prefix: Request, wanted: Retain, now: float) -> str:
        """Retain the prefix, whose blocks may come later. Returns why it is refused; empty if it is kept."""
        self._retention.keep(prefix, wanted, now)
        return prefix.diagnostics.refused

    def num_leading(self, prefix: Request, num_columns: int) -> int:
        """Leading columns that are on the device in all groups without a window."""
        full = [group for group, window in enumerate(self._groups.windows) if window is None]
        if not full:
            return 0
        for column in range(num_columns):
            if not all(self._find(prefix, column, group) for group in full):
                return column
        return num_columns

    def on_device(self, prefix: Request, first: int, count: int) -> list[list[int]] | None:
        """By group, the block of each of these columns; 0 behind the group's window. None if one is missing."""
        size = self._prefix.block_size
        num_columns = len(prefix.history) // 4 // size
        found: list[list[int]] = []
        for group, window in enumerate(self._groups.windows):
            begin = 0 if window is None else first_visible_column(num_columns * size, window, size)
            blocks = [self._find(prefix, column, group) for column in range(first, first + count)]
            if not all(blocks[max(0, begin - first) :]):
                return None
            found.append([block if column >= begin else 0 for column, block in enumerate(blocks, first)])
        return found

    def _find(self, prefix: Request, column: int, group: int) -> int:
        digest = self._prefix.hash_of(prefix, column)
        return self._pool.named.find(digest, self._prefix.tokens_of(prefix, column), group) or 0

    def take(self, count: int) -> list[int] | None:
        """Held blocks to fill; None if there is no room now. Each must end in `register` or `give_back`."""
        return self._pool.take_held(count) if count <= self._pool.num_available else None

    def register(self, prefix: Request, first: int, groups: Sequence[list[int]]) -> None:
        """These blocks are filled: by group, one for each column from `first` on; 0 where there is none."""
        self._prefix.register_blocks(prefix, first, list(groups))
        self.give_back([block for blocks in groups for block in blocks if block])

    def give_back(self, blocks: Sequence[int]) -> None:
        """Blocks without a registered content become free. The last column goes first, so it is evicted first."""
        self._pool.unhold(reversed(blocks))
