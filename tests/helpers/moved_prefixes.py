"""Exports and imports of kept prefixes between toy devices: the engine's own transfers, over blocks of digests."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from helpers.toy_device import ToyDevice, digest

from millrace.engine.fronts.transfers import Transfers
from millrace.link.block_parts import PartAnswer, PartOfPrefix
from millrace.params.keeping import Retain
from millrace.plan.scheduler import Scheduler

PART_BLOCKS = 2


class Done:
    def __init__(self, contents: bytes) -> None:
        self._contents = contents

    def wait(self) -> bytes:
        return self._contents


class Written:
    def wait(self) -> None:
        return None


class ToyContents:
    """The bytes of a block are the digests of its tokens."""

    layout = "toy"

    def __init__(self, device: ToyDevice) -> None:
        self._device = device
        self.block_bytes = 16 * device.block_size

    def read(self, blocks: np.ndarray) -> Done:
        found = self._device.read_blocks(blocks.tolist())
        assert not any(one is None for content in found for one in content), "a block that is not filled is exported"
        return Done(np.array(found, np.int64).tobytes())

    def write(self, blocks: np.ndarray, contents: bytes) -> Written:
        rows = np.frombuffer(contents, np.int64).reshape(len(blocks), -1, 2).tolist()
        for block, row in zip(blocks.tolist(), rows, strict=True):
            self._device.write_block(block, [(group, state) for group, state in row])
        return Written()


@dataclass(frozen=True)
class ExportedPrefix:
    """A file."""

    tokens: bytes
    salt: bytes
    parts: tuple[tuple[int, int, bytes, tuple[tuple[bool, ...], ...]], ...]
    """First column, columns, blocks, and which blocks there are."""


def transfers_of(scheduler: Scheduler, device: ToyDevice) -> Transfers:
    refused = "" if device.states is None else "States are not exported."
    own = Transfers(
        scheduler.transfer, ToyContents(device), identity="", block_tokens=device.block_size, refused=refused
    )
    # Small parts, so that short prompts have several; a server takes as many blocks as fit into megabytes.
    own._facts = msgspec.structs.replace(own._facts, part_blocks=PART_BLOCKS)
    return own


def exported(transfers: Transfers, tokens: bytes, salt: bytes, owner: str, now: float) -> ExportedPrefix | None:
    """What is cached of the beginning of these tokens; None if nothing is, or if a window's blocks are gone."""
    facts = transfers.facts("", owner, now)
    whole = len(tokens) // 4 // facts.block_tokens
    if not whole or facts.refused:
        return None
    columns = transfers.answer(PartOfPrefix(0, 0, owner, salt, tokens, 0, 0), now).columns
    if not columns:
        return None
    tokens = tokens[: 4 * columns * facts.block_tokens]
    parts: list[tuple[int, int, bytes, tuple[tuple[bool, ...], ...]]] = []
    for first in range(0, columns, PART_BLOCKS):
        count = min(PART_BLOCKS, columns - first)
        answer = transfers.answer(PartOfPrefix(0, 0, owner, salt, tokens, first, count), now)
        if answer.failure:
            assert "evicted meanwhile" in answer.failure
            return None
        parts.append((first, count, answer.blocks, answer.has))
    check_parts(tokens, parts, facts.block_tokens)
    return ExportedPrefix(tokens, salt, tuple(parts))


def check_parts(
    tokens: bytes, parts: list[tuple[int, int, bytes, tuple[tuple[bool, ...], ...]]], block_tokens: int
) -> None:
    """The file holds what its tokens have when they are computed alone."""
    state, states = 0, []
    for token in np.frombuffer(tokens, np.int32).tolist():
        state = digest(state, token)
        states.append(state)
    for first, _, blocks, has in parts:
        rows = iter(np.frombuffer(blocks, np.int64).reshape(-1, block_tokens, 2).tolist())
        for group, columns in enumerate(has):
            for column, exists in enumerate(columns, first):
                start = column * block_tokens
                assert not exists or next(rows) == [[group, one] for one in states[start : start + block_tokens]]


def imported(
    transfers: Transfers, file: ExportedPrefix, owner: str, retain: Retain | None, now: float, most: int
) -> bool:
    """Whether all of it was written; `most`: parts before the sender goes away."""
    for number, (first, count, blocks, has) in enumerate(file.parts):
        kept = None if number else retain
        part = PartOfPrefix(0, 0, owner, file.salt, file.tokens, first, count, blocks, has, kept)
        answer: PartAnswer = transfers.answer(part, now) if number < most else PartAnswer("gone")
        if answer.failure:
            assert answer.is_full or number == most
            return False
    return True
