"""Handles: prefixes that stay cached for a time, because a client asked for it.

A handle names the blocks of a prefix by their hashes, so it holds before they are computed, and again after they were
evicted and computed anew. Retained blocks that no row uses are evicted after all other cached ones: only where a
running request would have to be preempted otherwise. Admission counts them as taken while anything runs.

Handles may retain a share of the pool, each owner's at most its quota. One that finds no room first takes the place of
its owner's older hints, and is refused if that is not enough.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from millrace.params.keeping import Retain
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.planner.protocol import HandleFigures, HandleList
from millrace.plan.request import Request

NOTHING: Mapping[str, Collection[bytes]] = types.MappingProxyType({})
MAX_HANDLES = 1024
"""Of one owner."""


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    max_blocks: int = 0
    """Blocks that all handles together may retain; 0: none."""
    block_bytes: int = 1


@dataclass(slots=True)
class Handle:
    owner: str
    name: str
    digests: list[bytes]
    num_tokens: int
    ttl_s: float
    created: float
    expires: float
    is_hint: bool
    tokens: bytes
    """As int32 bytes."""
    salt: bytes
    has_adapter: bool


class Retention:
    def __init__(self, settings: RetentionSettings, pool: BlockPool, prefix: PrefixIndex, num_groups: int) -> None:
        self.settings = settings
        self._pool, self._prefix, self._num_groups = pool, prefix, num_groups
        self._handles: dict[tuple[str, str], Handle] = {}
        self._digests: dict[str, Counter[bytes]] = {}
        """By owner: how many of its handles name each block."""
        self._next_expiry = math.inf
        self.num_refused = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that the handles name, those of several owners counted for each."""
        return sum(map(len, self._digests.values())) * self._num_groups

    def bytes_of(self, owner: str) -> int:
        return len(self._digests.get(owner, ())) * self._num_groups * self.settings.block_bytes

    def advance(self, now: float) -> None:
        """Drop the handles that have expired."""
        if now < self._next_expiry:
            return
        for handle in [one for one in self._handles.values() if one.expires <= now]:
            self._drop(handle)
        self._next_expiry = min((one.expires for one in self._handles.values()), default=math.inf)

    def keep(self, request: Request, wanted: Retain, now: float) -> None:
        """Retain the prefix of the request, as far as its blocks are whole. A handle of the same name is replaced."""
        self.advance(now)
        noted, size = request.diagnostics, self._prefix.block_size
        num_tokens = min(wanted.num_tokens or request.num_prompt, request.num_prompt)
        num_columns = num_tokens // size
        if not num_columns:
            if wanted.is_required:  # Nothing to keep yet: nothing that could be refused.
                return
            noted.refused = f"The prefix has {num_tokens} tokens, less than one block of {size}."
            return
        self._prefix.hash_of(request, num_columns - 1)
        digests = request.hashes[:num_columns]
        name = wanted.name or f"prefix-{digests[-1].hex()[:16]}"
        why = self._make_room(request.tenant, name, digests, wanted)
        if why:
            noted.refused = why
            self.num_refused += 1
            return
        before = self._handles.get((request.tenant, name))
        created = now if before is None else before.created
        # The new one first, so that blocks of both stay where they are.
        handle = Handle(
            owner=request.tenant,
            name=name,
            digests=digests,
            num_tokens=num_columns * size,
            ttl_s=wanted.ttl_s,
            created=created,
            expires=now + wanted.ttl_s,
            is_hint=wanted.is_hint,
            tokens=bytes(request.history[: 4 * num_columns * size]),
            salt=request.salt,
            has_adapter=bool(request.adapter),
        )
        self._count(handle, 1)
        if before is not None:
            self._count(before, -1)
        self._handles[request.tenant, name] = handle
        self._next_expiry = min(self._next_expiry, handle.expires)
        noted.handle, noted.retained_tokens = name, handle.num_tokens
        noted.resident_tokens = self._resident_tokens(handle)

    def keep_answer(self, request: Request) -> None:
        """The request has ended and its blocks are registered: its handle names those of its answer too, unless they
        find no room."""
        wanted, size = request.retain, self._prefix.block_size
        handle = self._handles.get((request.tenant, request.diagnostics.handle))
        num_columns = min(request.num_computed, len(request.history) // 4) // size
        if wanted is None or handle is None or num_columns <= len(handle.digests):
            return
        self._prefix.hash_of(request, num_columns - 1)
        digests = request.hashes[:num_columns]
        if digests[: len(handle.digests)] != handle.digests or self._make_room(
            request.tenant, handle.name, digests, wanted
        ):
            return  # The handle was replaced meanwhile, or is full.
        tokens = bytes(request.history[: 4 * num_columns * size])
        longer = dataclasses.replace(handle, digests=digests, num_tokens=num_columns * size, tokens=tokens)
        self._count(longer, 1)
        self._count(handle, -1)
        self._handles[request.tenant, handle.name] = longer

    def find(self, name: str, owner: str, now: float) -> Handle | None:
        self.advance(now)
        return self._handles.get((owner, name))

    def renew(self, name: str, owner: str, ttl_s: float, now: float) -> int:
        """The handle lives so much longer from now on. Returns how many there are with this name."""
        self.advance(now)
        handle = self._handles.get((owner, name))
        if handle is None:
            return 0
        handle.ttl_s, handle.expires = ttl_s, now + ttl_s
        self._next_expiry = min(self._next_expiry, handle.expires)
        return 1

    def copy(self, name: str, owner: str, new_name: str, now: float) -> int:
        """A second handle for the same blocks, which cost no memory. Returns 0 if there is none with this name."""
        self.advance(now)
        handle = self._handles.get((owner, name))
        if handle is None or (owner, new_name) in self._handles or len(self._of(owner)) >= MAX_HANDLES:
            return 0
        made = dataclasses.replace(handle, name=new_name, created=now, expires=now + handle.ttl_s)
        self._count(made, 1)
        self._handles[owner, new_name] = made
        self._next_expiry = min(self._next_expiry, made.expires)
        return 1

    def _make_room(self, owner: str, name: str, digests: list[bytes], wanted: Retain) -> str:
        """Why the blocks find no room; empty if they do."""
        own = self._digests.get(owner, Counter())
        limit = self.settings.max_blocks
        own_limit = wanted.handle_bytes // self.settings.block_bytes // self._num_groups
        if wanted.handle_bytes and len(digests) > own_limit:
            size = self._prefix.block_size
            return (
                f"{len(digests) * size} tokens do not fit: max_bytes is {wanted.handle_bytes}, which holds"
                f" {own_limit * size} tokens. Start a new session or fork, or allow more bytes."
            )
        if wanted.max_bytes:
            limit = min(limit, wanted.max_bytes // self.settings.block_bytes)
        may_make_room = self._num_without_hints(owner, name, digests) <= limit
        while True:
            others = [one for one in self._of(owner) if one.name != name]
            replaced = self._handles.get((owner, name))
            leaving = Counter(replaced.digests) if replaced is not None else Counter[bytes]()
            kept = {digest for digest, count in own.items() if count > leaving[digest]}
            num_own = len(kept.union(digests)) * self._num_groups
            num_all = self.num_blocks - len(own) * self._num_groups + num_own
            if num_own <= limit and num_all <= self.settings.max_blocks and len(others) < MAX_HANDLES:
                return ""
            hints = [one for one in others if one.is_hint]
            if not (may_make_room and hints):
                break
            self._drop(min(hints, key=lambda one: one.expires))
            own = self._digests.get(owner, Counter())
        size = self._prefix.block_size
        if len(digests) * self._num_groups > limit:
            return (
                f"{len(digests) * size} tokens do not fit: at most {limit // self._num_groups * size} may be kept. Keep"
                " a shorter beginning of the prompt; the operator can allow more (--kv-retained, cache_mib)."
            )
        return (
            f"{len(digests) * size} tokens do not fit: {limit // self._num_groups * size} tokens may be kept, and"
            f" this owner's handles have {len(own) * size} already. Delete a handle, or wait until one expires."
        )

    def _num_without_hints(self, owner: str, name: str, digests: list[bytes]) -> int:
        """Blocks of the owner if these replaced the handle of that name and all its hints."""
        fixed = [one for one in self._of(owner) if one.name != name and not one.is_hint]
        return len({*digests, *(digest for one in fixed for digest in one.digests)}) * self._num_groups

    def drop(self, name: str, owner: str | None) -> int:
        """End the handles with this name, of this owner (None: of any). Returns how many there were."""
        found = [one for one in self._of(owner) if one.name == name]
        for handle in found:
            self._drop(handle)
        return len(found)

    def forget(self, owner: str) -> int:
        """End all handles of this owner. Returns how many there were."""
        found = self._of(owner)
        for handle in found:
            self._drop(handle)
        return len(found)

    def listed(self, owner: str | None, now: float, below: Mapping[str, Collection[bytes]] = NOTHING) -> HandleList:
        """The handles of this owner (None: of all). `below`: the names of blocks at the locations below the device,
        nearest first."""
        self.advance(now)
        block_bytes = self.settings.block_bytes
        found = [
            HandleFigures(
                name=one.name,
                owner=one.owner,
                tokens=one.num_tokens,
                resident_tokens=self._resident_tokens(one),
                bytes=len(one.digests) * self._num_groups * block_bytes,
                age_s=now - one.created,
                ttl_s=one.ttl_s,
                expires_in_s=one.expires - now,
                is_hint=one.is_hint,
                locations=self._locations(one, below),
            )
            for one in self._of(owner)
        ]
        used = self.num_blocks * block_bytes if owner is None else self.bytes_of(owner)
        return HandleList(found, used, self.settings.max_blocks * block_bytes)

    def _resident_tokens(self, handle: Handle) -> int:
        """Tokens of the prefix that need not be computed now."""
        size = self._prefix.block_size
        return self._pool.named.num_leading(handle.digests) * size

    def _locations(self, handle: Handle, below: Mapping[str, Collection[bytes]]) -> dict[str, int]:
        """Tokens by the nearest location that has their block; those that none has are missing."""
        size, places = self._prefix.block_size, {"device": self._pool.named.names, **below}
        found = Counter(
            next((place for place, names in places.items() if digest in names), "") for digest in handle.digests
        )
        return {place: found[place] * size for place in places}

    def _of(self, owner: str | None) -> list[Handle]:
        return [one for one in self._handles.values() if owner is None or one.owner == owner]

    def _drop(self, handle: Handle) -> None:
        del self._handles[handle.owner, handle.name]
        self._count(handle, -1)

    def _count(self, handle: Handle, change: int) -> None:
        own = self._digests.setdefault(handle.owner, Counter())
        for digest in handle.digests:
            own[digest] += change
            if not own[digest]:
                del own[digest]
        if not own:
            del self._digests[handle.owner]
        if change > 0:
            self._pool.cached.retain(handle.digests)
        else:
            self._pool.cached.let_go(handle.digests)

    def check(self) -> None:
        """Check that the pool retains what the handles name, within the limit. For tests."""
        named = Counter(digest for one in self._handles.values() for digest in one.digests)
        if named != self._pool.cached.retained_names:
            raise AssertionError("the pool retains other blocks than the handles name")
        if self.num_blocks > self.settings.max_blocks:
            raise AssertionError(f"{self.num_blocks} blocks are retained, of {self.settings.max_blocks}")
