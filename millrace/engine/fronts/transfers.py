"""Exports and imports of kept prefixes: an engine's part, block by block.

The loop waits for each part, which is small: a part delays the next step by a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from millrace.link.block_parts import PartAnswer, PartOfPrefix, PrefixFacts
from millrace.params.keeping import Retain
from millrace.plan.request import Request
from millrace.plan.step import Int32s

PART_BYTES = 2 << 20
"""Of blocks, in one part, unless a single column has more."""
NO_REQUEST = -(1 << 62)
"""Stands for the id of a request, and for that of an arrival."""


class KeptPrefix(Protocol):
    """What a handle names."""

    tokens: bytes
    salt: bytes
    ttl_s: float
    has_adapter: bool


class MovingPrefixes(Protocol):
    """The planner's part."""

    @property
    def num_groups(self) -> int: ...

    def handle(self, name: str, owner: str, now: float) -> KeptPrefix | None: ...

    def keep(self, prefix: Request, wanted: Retain, now: float) -> str:
        """Returns why it is refused; empty if it is kept."""

    def num_leading(self, prefix: Request, num_columns: int) -> int:
        """Leading columns that are cached."""

    def on_device(self, prefix: Request, first: int, count: int) -> list[list[int]] | None:
        """By group, the block of each of these columns; 0 where none is needed. None if one is missing."""

    def take(self, count: int) -> list[int] | None:
        """Held blocks to fill; None if there is no room."""

    def register(self, prefix: Request, first: int, groups: Sequence[list[int]]) -> None:
        """These blocks are filled."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """These are not."""


class PendingBytes(Protocol):
    def wait(self) -> bytes: ...


class PendingWrite(Protocol):
    def wait(self) -> None: ...


class Contents(Protocol):
    layout: str
    block_bytes: int

    def read(self, blocks: Int32s) -> PendingBytes: ...

    def write(self, blocks: Int32s, contents: bytes) -> PendingWrite: ...


class Transfers:
    def __init__(
        self, planner: MovingPrefixes, contents: Contents, *, identity: str, block_tokens: int, refused: str
    ) -> None:
        """`refused`: why blocks of this engine cannot move; empty if they can."""
        self._planner = planner
        self._contents = contents
        column_bytes = planner.num_groups * contents.block_bytes
        part_blocks = max(1, PART_BYTES // column_bytes)
        self._facts = PrefixFacts(
            layout=f"{contents.layout} groups {planner.num_groups}",
            identity=identity,
            block_tokens=block_tokens,
            part_blocks=part_blocks,
            part_bytes=part_blocks * column_bytes,
            refused=refused,
        )

    def facts(self, name: str, owner: str, now: float) -> PrefixFacts:
        """Those of the engine, and the prefix of this handle, if there is one."""
        handle = self._planner.handle(name, owner, now)
        if handle is None:
            return self._facts
        if handle.has_adapter:
            refused = f"{name!r} was computed with an adapter, and blocks of adapters are not exported."
            return msgspec.structs.replace(self._facts, refused=refused)
        return msgspec.structs.replace(self._facts, tokens=handle.tokens, salt=handle.salt, ttl_s=handle.ttl_s)

    def answer(self, part: PartOfPrefix, now: float) -> PartAnswer:
        if self._facts.refused:
            return PartAnswer(self._facts.refused)
        prefix = Request(NO_REQUEST, np.frombuffer(part.tokens, np.int32), 1, tenant=part.owner, salt=part.salt)
        prefix.history = bytearray(part.tokens)
        num_columns = len(part.tokens) // 4 // self._facts.block_tokens
        if not part.count:
            return PartAnswer(columns=self._planner.num_leading(prefix, num_columns))
        if part.count > self._facts.part_blocks:
            return PartAnswer(f"A part has {self._facts.part_blocks} blocks of each group at most, not {part.count}.")
        if not 0 <= part.first < part.first + part.count <= num_columns:
            return PartAnswer(f"The prefix has {num_columns} blocks, not {part.first + part.count}.")
        if part.retain is not None:
            refused = self._planner.keep(prefix, part.retain, now)
            if refused:
                return PartAnswer(refused, is_full=True)
        return self._read(prefix, part) if part.blocks is None else self._write(prefix, part, part.blocks)

    def _read(self, prefix: Request, part: PartOfPrefix) -> PartAnswer:
        groups = self._planner.on_device(prefix, part.first, part.count)
        if groups is None:
            return PartAnswer("Blocks of the prefix were evicted meanwhile; try again.")
        blocks = [block for group in groups for block in group if block]
        contents = self._contents.read(np.array(blocks, np.int32)).wait()
        return PartAnswer(blocks=contents, has=tuple(tuple(map(bool, group)) for group in groups))

    def _write(self, prefix: Request, part: PartOfPrefix, contents: bytes) -> PartAnswer:
        count = sum(map(sum, part.has))
        if [len(group) for group in part.has] != [part.count] * self._planner.num_groups:
            return PartAnswer("The part does not say which blocks it has.")
        if len(contents) != count * self._contents.block_bytes:
            return PartAnswer(f"{count} blocks have {count * self._contents.block_bytes} bytes, not {len(contents)}.")
        blocks = self._planner.take(count)
        if blocks is None:
            return PartAnswer(
                f"{count} KV blocks are needed and running requests use them; try again later.", is_full=True
            )
        try:
            self._contents.write(np.array(blocks, np.int32), contents).wait()
        except BaseException:
            self._planner.give_back(blocks)
            raise
        free = iter(blocks)
        groups = [[next(free) if has else 0 for has in group] for group in part.has]
        self._planner.register(prefix, part.first, groups)
        return PartAnswer()
