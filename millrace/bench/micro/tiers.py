"""Write policies of the disk tier on a recorded trace: three locations of blocks, without steps or a model.

A block is one of the trace's: 512 tokens. Each location evicts the least recently used block. What the device evicts
goes to host memory, and what reaches host memory goes to the disk if the policy wants it there. A block that is found
below the device is on the device and in host memory afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.bench.micro.eviction import COLUMN_COST, BlockNames
from millrace.load.sources import TracedRequest, read_trace
from millrace.load.svg import Line, plot, svg_file
from millrace.load.workload import BLOCK_TOKENS
from millrace.plan.kv.block_hash import root_hash
from millrace.plan.kv.slot_index import SlotIndex
from millrace.plan.kv.tier import CacheKey, EvictionCause, Tier
from millrace.plan.step import Location

DEVICE_TOKENS, HOST_TOKENS = 1_000_000, 2_000_000
DISKS = (0, 4_000_000, 16_000_000, 64_000_000)
"""Tokens on the disk."""
LOCATIONS: tuple[Location, ...] = ("device", "host", "disk")
MIN_COST = 2.0
"""Of `cost`: uses of a block times the time to compute it, in that of a first block."""

Wanted = Callable[[int, int], bool]
"""Whether to write a block, by its uses and its place in the prompt."""
POLICIES: dict[str, Wanted] = {
    "all": lambda uses, at: True,
    "second use": lambda uses, at: uses >= 2,
    "cost": lambda uses, at: uses * (1 + COLUMN_COST * at) >= MIN_COST,
}


@dataclass(frozen=True, slots=True)
class TiersReplayed:
    policy: str
    disk_tokens: int
    found: dict[Location, float]
    """Share of the blocks by the location where they were found."""
    written: float
    """Blocks written to the disk, by the blocks of all prompts."""


def tier_figures(trace: Path, svg: Path | None = None) -> Iterator[Figure]:
    requests = [one for one in read_trace(trace) if one.blocks]
    if not requests:
        raise BenchError(f"The requests of {trace} have no hash_ids, so nothing tells which prefixes are equal.")
    totals: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for disk_tokens in DISKS:
        for policy in POLICIES:
            done = replay_tiers(requests, policy, disk_tokens)
            totals[policy].append(100 * sum(done.found.values()))
            parts = ", ".join(f"{name} {share:.1%}" for name, share in done.found.items())
            note = f"{parts}; {done.written:.1%} of the blocks written"
            yield Figure(f"disk of {disk_tokens:,} tokens", policy, totals[policy][-1], "% found", note=note)
    if svg is not None:
        sizes = [disk / 1e6 for disk in DISKS]
        lines = [Line(policy, sizes, shares) for policy, shares in totals.items()]
        title = f"Prompt tokens found: {DEVICE_TOKENS:,} on the device, {HOST_TOKENS:,} in host memory"
        svg.write_text(svg_file(plot(title, lines, "millions of tokens on the disk", "%")), encoding="utf-8")


def replay_tiers(
    requests: Sequence[TracedRequest],
    policy: str,
    disk_tokens: int,
    device_tokens: int = DEVICE_TOKENS,
    host_tokens: int = HOST_TOKENS,
) -> TiersReplayed:
    longest = max(len(one.blocks) for one in requests)
    sizes = (max(device_tokens // BLOCK_TOKENS, longest), host_tokens // BLOCK_TOKENS, disk_tokens // BLOCK_TOKENS)
    tiers, names, root = _Tiers(POLICIES[policy], sizes), BlockNames(), root_hash(b"")
    found: Counter[Location] = Counter()
    num_all = 0
    for one in requests:
        digests, contents = names.chain(root, one.blocks)
        places = tiers.leading(digests, contents)
        found.update(places)
        num_all += len(digests)
        tiers.use(digests, contents)
    shares = {location: found[location] / num_all for location in LOCATIONS}
    return TiersReplayed(policy, disk_tokens, shares, tiers.num_written / num_all)


class _Tiers:
    """Moves blocks between the indexes: a `TierListener` of the device's and of host memory's."""

    def __init__(self, wants: Wanted, sizes: Sequence[int]) -> None:
        self._wants = wants
        self._indexes = [SlotIndex(location, size) for location, size in zip(LOCATIONS, sizes, strict=True)]
        self._device, self._host, self._disk = self._indexes
        self._uses: Counter[CacheKey] = Counter()
        self._about: dict[CacheKey, tuple[int, bytes]] = {}
        """Place in the prompt, and tokens."""
        self.num_written = 0
        self._device.listeners.append(self)
        self._host.listeners.append(self)

    def leading(self, digests: Sequence[bytes], contents: Sequence[bytes]) -> list[Location]:
        """Where the first blocks are, up to the first that is nowhere."""
        places: list[Location] = []
        for digest, content in zip(digests, contents, strict=True):
            place = next((one.location for one in self._indexes if one.find(digest, content) is not None), None)
            if place is None:
                break
            places.append(place)
        return places

    def use(self, digests: Sequence[bytes], contents: Sequence[bytes]) -> None:
        """All blocks of a prompt are on the device afterwards, the first one the most recently used."""
        for at in reversed(range(len(digests))):
            key = (0, digests[at])
            self._uses[key] += 1
            self._about[key] = at, contents[at]
            if key in self._disk and key not in self._device:
                self._put(self._host, key)
            for index in self._indexes:
                index.touch(key)
            self._put(self._device, key)

    def _put(self, index: SlotIndex, key: CacheKey) -> None:
        if index.total and key not in index:
            index.fill(key, self._about[key][1])
            index.filled(key, failed=False)

    def _write(self, key: CacheKey) -> None:
        if self._disk.total and key not in self._disk and self._wants(self._uses[key], self._about[key][0]):
            self._put(self._disk, key)
            self.num_written += 1

    # -- told of the device and host memory ---------------------------------------------------------------------

    def filled(self, tier: Tier, key: CacheKey) -> None:
        if tier is self._host:
            self._write(key)

    def used(self, tier: Tier, key: CacheKey) -> None:
        if tier is self._host:
            self._write(key)

    def evicted(self, tier: Tier, key: CacheKey, cause: EvictionCause) -> None:
        if tier is self._device:
            self._put(self._host, key)
