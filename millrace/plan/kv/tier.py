"""A tier: a location that keeps blocks beside the device, each under its cache key.

The key names a block's content wherever it is. The content itself (the tokens) is compared beside it, so that equal
hashes of different texts do no harm.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from millrace.plan.step import Location

CacheKey = tuple[int, bytes]
"""KV group and block hash. The hash covers the parent's, the tokens, and at the root the salt (`block_hash.py`)."""
EvictionCause = Literal["room", "failed", "forgotten"]
"""Room was needed for another block, a copy failed, or the block's tenant was forgotten."""


class Place(NamedTuple):
    """Where a block is: a block id on the device, a slot elsewhere."""

    location: Location
    at: int


class TierListener(Protocol):
    """Told of what happens to the blocks of a tier."""

    def filled(self, tier: Tier, key: CacheKey) -> None:
        """The block can be loaded from now on."""

    def used(self, tier: Tier, key: CacheKey) -> None:
        """A request used the block."""

    def evicted(self, tier: Tier, key: CacheKey, cause: EvictionCause) -> None:
        """The block is there no longer."""


class Tier(Protocol):
    location: Location
    total: int
    """Blocks that it holds at most."""
    listeners: list[TierListener]

    @property
    def num_used(self) -> int: ...

    def __contains__(self, key: CacheKey) -> bool:
        """True if the block is here or on its way here."""

    def find(self, digest: bytes, tokens: bytes, group: int = 0) -> int | None:
        """The slot that holds the group's block with this hash, or None. Compares the tokens too."""

    def touch(self, key: CacheKey) -> None:
        """The block was used: it is evicted last."""

    def fill(self, key: CacheKey, tokens: bytes, parent: bytes | None = None) -> int | None:
        """A slot for a block that is not here, evicting if none is free; None if copies use all of them. `parent`: hash
        of the block before it, if known."""

    def filled(self, key: CacheKey, failed: bool) -> None:
        """The copy to this block's slot ended."""

    def pin(self, key: CacheKey) -> None:
        """A copy will read the block's slot, which `find` returned."""

    def unpin(self, key: CacheKey, failed: bool) -> None:
        """The copy from the block's slot ended. If it failed, the block is not loaded again."""

    def digests(self) -> list[bytes]:
        """Hashes of the blocks of group 0 that can be loaded."""

    def check(self) -> None:
        """Check the tier's equation. For tests."""
