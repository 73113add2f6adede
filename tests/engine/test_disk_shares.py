"""Shares of blocks on a disk, of rank 0 and another one in one process: records and replies are passed by hand."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from helpers.served import wait_until

from millrace.config import Config, replace
from millrace.engine.copies import PendingCopy
from millrace.engine.disk.copier import DiskCopier
from millrace.engine.disk.open import open_disk
from millrace.engine.disk.others import OtherDisks, Replies, digests_of
from millrace.engine.disk.share import DiskShare
from millrace.plan.planner.block_names import DIGEST_BYTES, HASH_BYTES, mark_in, name_bytes
from millrace.plan.step import BlockCopies, Int32s
from millrace.run.device.host_blocks import HostBlocks
from millrace.run.ranks.recorder import DiskWork

BLOCK_SIZE, SLOTS = 4, 8


def ints(*values: int) -> Int32s:
    return np.array(values, np.int32)


def name(number: int) -> bytes:
    """The mark of its owner is its number."""
    tokens = name_bytes(BLOCK_SIZE) - 1 - DIGEST_BYTES
    return bytes(1 + HASH_BYTES) + bytes([number]) * (DIGEST_BYTES - HASH_BYTES) + bytes(tokens)


class Ranks:
    """Of the second rank a block is half as large."""

    def __init__(self, folder: Path) -> None:
        key = folder / "key"
        key.write_text("k" * 32)
        changes = {"memory__kv_disk": str(folder / "kv"), "memory__kv_disk_gib": 0.01, "memory__kv_host_gib": 1.0}
        config = replace(Config(), **changes, memory__kv_disk_key=str(key), plan__block_size=BLOCK_SIZE)
        self.host = [HostBlocks(SLOTS, (width,), torch.float32) for width in (16, 8)]
        store = open_disk(config, "same", 64, num_slots=SLOTS)
        assert store is not None
        self.replies: Replies = SimpleQueue()
        self.share = DiskShare(config, 1, "same", SLOTS, self.host[1:], lambda reply: self.replies.put((1, reply)))
        others = OtherDisks(self, self.replies, 1)  # type: ignore[arg-type]
        assert others.are_usable
        self.common = others.common(store.stored())
        self.disks = DiskCopier(store, self.host[:1], None, others)  # type: ignore[arg-type]

    def disk(self, work: DiskWork) -> None:
        self.share.take(work, ())

    def fill(self, place: int, value: float) -> None:
        for host in self.host:
            host.run(place, 1).fill_(value)

    def held(self, place: int) -> list[float]:
        return [float(host.run(place, 1).mean()) for host in self.host]

    def write(self, place: int, slot: int, number: int) -> PendingCopy:
        return ended(self.disks.copy(BlockCopies(1, "host", "disk", ints(place), ints(slot), (name(number),))))

    def read(self, slot: int, place: int, number: int) -> PendingCopy:
        return ended(self.disks.copy(BlockCopies(1, "disk", "host", ints(slot), ints(place), (name(number),))))

    def close(self) -> None:
        self.disks.close()
        self.share.close()


def ended(pending: PendingCopy) -> PendingCopy:
    wait_until(pending.done, "the copy")
    return pending


def test_every_rank_stores_and_reads_its_part(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.fill(2, 7.0)
    ranks.write(2, 5, 1).wait()
    ranks.fill(2, 0.0)
    ranks.read(5, 3, 1).wait()
    assert ranks.held(3) == [7.0, 7.0]
    ranks.close()
    again = Ranks(tmp_path)
    assert again.common == [(5, name(1))]
    again.close()


def test_a_copy_fails_if_it_fails_on_one_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.write(0, 1, 1).wait()
    (file,) = (tmp_path / "kv").glob("*-rank1/blocks")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(OSError, match="rank 1: .*damaged"):
        ranks.read(1, 2, 1).wait()
    ranks.close()


def test_what_one_rank_lacks_or_has_otherwise_is_not_there(tmp_path: Path) -> None:
    steps, replies = Ranks(tmp_path), SimpleQueue[tuple[int, bytes]]()
    stored = [(slot, name(slot)) for slot in range(4)]
    others = OtherDisks(steps, replies, 2)  # type: ignore[arg-type]
    assert not others.are_usable
    others.shares = [digests_of(stored[:3]), digests_of([stored[0], stored[2], (1, name(9))])]
    assert others.common(stored) == [stored[0], stored[2]]
    others.shares[1] = None
    assert not others.are_usable
    steps.close()


def test_an_owner_is_forgotten_on_every_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for slot in (1, 2):
        ranks.write(slot, slot, slot).wait()
    ended(ranks.disks.forget(mark_in(name(1)))).wait()
    for number in (1, 2):
        pending = ranks.read(number, 3, number)
        if number == 2:
            pending.wait()
            continue
        for share in (pending, *pending._parts):  # type: ignore[attr-defined]
            with pytest.raises(OSError, match="damaged"):
                share.wait()
    ranks.close()
    again = Ranks(tmp_path)
    assert again.common == [(2, name(2))]
    again.close()
