"""The tiers below the device, as one: blocks go down from host memory to the disk, and come back the same way."""

from __future__ import annotations

import itertools
from typing import Any

from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.disk_tier import DiskTier, DiskTierSettings
from millrace.plan.kv.host_tier import HostTier, HostTierSettings, Loading
from millrace.plan.kv.prefix import Match, PrefixIndex
from millrace.plan.kv.slot_index import SlotIndex
from millrace.plan.request import Request
from millrace.plan.step import BlockCopies, Location


class LowerTiers:
    def __init__(self, host: HostTierSettings, disk: DiskTierSettings, has_cache: bool) -> None:
        """`has_cache`: without a prefix cache there are none."""
        if disk.num_slots and not host.num_slots:
            raise ValueError("blocks go to a disk through host memory, but there is no host tier")
        self._host_settings, self._disk_settings = host, disk
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        sizes: dict[Location, int] = {"host": host.num_slots, "disk": disk.num_slots}
        self.indexes = [SlotIndex(location, size) for location, size in sizes.items() if size and has_cache]

    def join(self, pool: BlockPool, prefix: PrefixIndex, most_per_step: int) -> None:
        """`pool`: made with the indexes of these tiers. `most_per_step`: blocks that one step may take."""
        numbers, below = itertools.count(), self.indexes[1] if len(self.indexes) > 1 else None
        if self.indexes:
            parts = (self.indexes[0], pool, prefix, most_per_step, numbers, below)
            self.host = HostTier(self._host_settings, *parts)
            if below is not None:
                self.disk = DiskTier(self._disk_settings, below, self.host, prefix, numbers)

    @property
    def num_near(self) -> int:
        """Batches in flight to and from the device."""
        return self.host.num_copies if self.host is not None else 0

    def figures(self) -> dict[str, Any]:
        """Fields of `PlannerFigures`."""
        host, disk = self.host, self.disk
        if host is None:
            return {}
        found = {
            "host_blocks_total": host.index.total,
            "host_blocks_used": host.index.num_used,
            "host_tokens_loaded": host.tokens_loaded,
            "host_copies_failed": host.copies_failed,
            "evictions_below": {index.location: dict(index.num_evicted) for index in self.indexes},
        }
        if disk is None:
            return found
        return found | {
            "disk_blocks_total": disk.index.total,
            "disk_blocks_used": disk.index.num_used,
            "disk_blocks_written": disk.blocks_written,
            "disk_tokens_read": disk.tokens_read,
            "disk_copies_failed": disk.reads_failed + disk.writes_failed,
            "disk_blocks_lost": disk.num_lost,
        }

    def advance(self, now: float, is_idle: bool) -> None:
        """Call before each plan. `is_idle`: no request waits or runs."""
        if self.host is not None:
            self.host.advance(now, is_idle)
        if self.disk is not None:
            self.disk.advance(now)

    def load(self, request: Request, match: Match) -> Loading:
        """Blocks that continue the prefix begin to come nearer: from the disk to host memory, then to the device."""
        if self.disk is not None and self.disk.load(request, match) == "started":
            return "started"
        return self.host.load(request, match) if self.host is not None else "none"

    def forget(self, mark: bytes) -> dict[str, int]:
        """Drop the blocks of the owner with this mark. Returns how many each location had."""
        return {index.location: index.forget(mark) for index in self.indexes}

    def take_copies(self) -> list[BlockCopies]:
        """Copies to issue now. Each must end with `copies_done`."""
        return [copies for tier in (self.host, self.disk) if tier is not None for copies in tier.take_copies()]

    def copies_done(self, copies: BlockCopies, failed: bool, seconds: float) -> None:
        tier = self.disk if "disk" in (copies.source, copies.target) else self.host
        if tier is not None:
            tier.copies_done(copies, failed, seconds)
