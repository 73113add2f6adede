"""KV groups: the layers of a model by attention window. A row has one block list per group.

All groups have the same number of layers, so one pool of blocks serves them all. In a group with a window, blocks that
no later token can see are freed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroups:
    windows: tuple[int | None, ...] = (None,)
    """The window of each group: a token at position p sees keys k with p - k < window. None: all keys before it."""

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_full(self) -> int:
        """Groups without a window."""
        return sum(window is None for window in self.windows)

    @property
    def windowed(self) -> tuple[tuple[int, int], ...]:
        """(group, window) of the groups with a window."""
        return tuple((group, window) for group, window in enumerate(self.windows) if window is not None)

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """The most blocks that a row of this many tokens holds while it decodes."""
        columns = -(-num_tokens // block_size)
        if self.windows == (None,):
            return columns
        return sum(columns if window is None else min(columns, -(-window // block_size) + 1) for window in self.windows)

    def tokens_in(self, num_blocks: int, block_size: int, most: int) -> int:
        """The longest row, up to `most` tokens, that this many blocks can hold while it decodes."""
        if not self.windowed:
            return num_blocks // self.num_groups * block_size
        low, high = 0, most // block_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.blocks_for(middle * block_size, block_size) <= num_blocks else (low, middle - 1)
            )
        return low * block_size


def first_visible_column(num_tokens: int, window: int, block_size: int) -> int:
    """The first column of a block table that a token at position `num_tokens` or later can see."""
    return max(0, num_tokens - window + 1) // block_size


ONE_GROUP = KvGroups()
