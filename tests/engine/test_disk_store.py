"""Files of KV blocks: what was written is read, all else is unreadable, and a hung disk holds up nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.config import Config, replace
from millrace.engine.disk.copier import DiskCopier
from millrace.engine.disk.forms import BlockForm, EncryptedForm
from millrace.engine.disk.owner_keys import OwnerKeys, read_disk_key
from millrace.engine.disk.store import PLAIN, BlockStore, UnreadableBlock, entry_bytes, open_store
from millrace.errors import ConfigError
from millrace.plan.step import BlockCopies
from millrace.run.device.host_blocks import HostBlocks

SLOTS, BYTES, NAME = 4, 96, 40


def opened(folder: Path, num_slots: int = SLOTS, form: BlockForm = PLAIN) -> BlockStore:
    store = open_store(folder, num_slots=num_slots, block_bytes=BYTES, name_bytes=NAME, form=form)
    assert store is not None
    return store


def name(number: int) -> bytes:
    """Its owner's mark is eight times the number."""
    return bytes([number]) * NAME


def encrypted(folder: Path, key: int = 0) -> EncryptedForm:
    return EncryptedForm(OwnerKeys(folder / "keys", bytes([key] * 32)))


def content(number: int) -> list[memoryview]:
    """A block in two parts."""
    return [memoryview(bytearray([number] * 64)), memoryview(bytearray([number + 1] * 32))]


def read(store: BlockStore, slot: int, wanted: bytes) -> list[bytes]:
    parts = content(0)
    store.read(slot, wanted, parts)
    return [bytes(part) for part in parts]


def test_with_a_key_nothing_is_readable_without_it(tmp_path: Path) -> None:
    store = opened(tmp_path, form=encrypted(tmp_path))
    for slot, number in ((2, 65), (1, 70)):
        store.write(slot, name(number), content(number))
    store.close()
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not any(bytes([byte] * 6) in stored for byte in (65, 66, 70, 71))
    store = opened(tmp_path, form=encrypted(tmp_path))
    assert store.stored() == [(2, name(65)), (1, name(70))]
    assert read(store, 2, name(65)) == [bytes(part) for part in content(65)]
    with pytest.raises(UnreadableBlock):
        read(store, 2, name(70))
    with (tmp_path / "blocks").open("r+b") as file:
        file.seek(2 * (BYTES + EncryptedForm.extra_bytes) + 40)
        file.write(b"?")
    with pytest.raises(UnreadableBlock):
        read(store, 2, name(65))
    store.close()
    store = opened(tmp_path, form=encrypted(tmp_path, 1))
    assert store.stored() == []
    store.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_forgotten_owner_has_nothing_on_the_disk(tmp_path: Path, is_encrypted: bool) -> None:
    def form() -> BlockForm:
        return encrypted(tmp_path) if is_encrypted else PLAIN

    store = opened(tmp_path, form=form())
    for slot, number in enumerate((65, 70, 65)):
        store.write(slot, name(number), content(number))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not is_encrypted or len([*(tmp_path / "keys").iterdir()]) == 2, "a key for each owner"
    store.forget(bytes([65] * 8))
    with pytest.raises(UnreadableBlock):
        read(store, 0, name(65))
    assert read(store, 1, name(70)) == [bytes(part) for part in content(70)]
    store.close()
    assert not any(bytes([65] * 6) in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    store = opened(tmp_path, form=form())
    assert store.stored() == [(1, name(70))]
    store.write(0, name(65), content(66))
    store.close()
    if is_encrypted:  # Files that somebody copied before are unreadable, too, also with the owner's new key.
        for path in (tmp_path / "blocks", tmp_path / "entries"):
            path.write_bytes(before[path])
        store = opened(tmp_path, form=form())
        assert store.stored() == [(1, name(70))]
        with pytest.raises(UnreadableBlock):
            read(store, 0, name(65))
        store.close()


def test_two_processes_use_one_key_of_an_owner(tmp_path: Path) -> None:
    first, second = (OwnerKeys(tmp_path / "keys", bytes(32)) for _ in range(2))
    mark = bytes([5] * 8)
    sealed = first.make(mark).seal(b"text", b"")
    assert second.make(mark).open(sealed, b"") == b"text"
    first.destroy(mark)
    second.destroy(mark)
    assert first.find(mark) is second.find(mark) is None
    assert first.make(mark).open(sealed, b"") is None
    assert OwnerKeys(tmp_path / "keys", bytes([1] * 32)).find(mark) is None


def test_every_byte_of_the_key_file_counts(tmp_path: Path) -> None:
    keys = []
    for secret in (b"\n" + b"a" * 31, b" " + b"a" * 31, b"a" * 31 + b"\n", b"a" * 32 + b"\n", b"a" * 32):
        (tmp_path / "key").write_bytes(secret)
        keys.append(read_disk_key(str(tmp_path / "key")))
    assert len(set(keys)) == len(keys)
    (tmp_path / "key").write_bytes(b"a" * 31)
    with pytest.raises(ConfigError, match="31 bytes; write at least 32"):
        read_disk_key(str(tmp_path / "key"))


def test_what_was_written_is_found_again_the_oldest_first(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for slot, number in ((2, 1), (0, 2), (2, 3)):
        store.write(slot, name(number), content(number))
    store.close()
    store = opened(tmp_path)
    assert store.stored() == [(0, name(2)), (2, name(3))]
    assert read(store, 2, name(3)) == [bytes(part) for part in content(3)]
    store.write(1, name(4), content(4))
    store.close()
    smaller = opened(tmp_path, num_slots=2)
    assert smaller.stored() == [(0, name(2)), (1, name(4))]
    assert (tmp_path / "blocks").stat().st_size == 2 * BYTES
    with pytest.raises(OSError, match="exceed"):
        smaller.write(2, name(5), content(5))
    smaller.close()


@pytest.mark.parametrize("at", [0, 70, 95])
def test_a_damaged_block_and_one_of_another_name_are_unreadable(tmp_path: Path, at: int) -> None:
    store = opened(tmp_path)
    store.write(1, name(1), content(1))
    with pytest.raises(UnreadableBlock, match="slot 1"):
        read(store, 1, name(2))
    with (tmp_path / "blocks").open("r+b") as file:
        file.seek(BYTES + at)
        file.write(b"\xff")
    with pytest.raises(UnreadableBlock):
        read(store, 1, name(1))
    store.close()


def test_a_damaged_entry_is_no_entry_and_a_lost_file_is_no_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for slot in range(3):
        store.write(slot, name(slot), content(slot))
    store.close()
    with (tmp_path / "entries").open("r+b") as file:
        file.seek(entry_bytes(NAME) + 5)
        file.write(b"\xff")
    os.truncate(tmp_path / "blocks", 2 * BYTES + 10)
    store = opened(tmp_path)
    assert store.stored() == [(0, name(0)), (2, name(2))]
    with pytest.raises(OSError, match="ends early"):
        read(store, 2, name(2))
    store.close()


def test_files_are_the_owners_alone_and_a_folder_has_one_owner(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = opened(folder)
    assert [path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())] == [0] * 4
    with pytest.raises(ConfigError, match="Another server"):
        opened(folder)
    store.close()
    opened(folder).close()


def test_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.write(0, name(1), content(1))
    store.close()
    open_file = os.open

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError("read-only")
        return open_file(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    store = opened(tmp_path)
    assert store.stored() == [(0, name(1))]
    assert read(store, 0, name(1)) == [bytes(part) for part in content(1)]
    with pytest.raises(OSError, match="read-only"):
        store.write(1, name(2), content(2))
    store.close()


class HangingFile:
    """A disk that does not answer until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def read(self, offset: int, parts: Sequence[memoryview]) -> None:
        raise OSError("nothing was written")

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        assert self.go.wait(60)

    def sync(self) -> None: ...

    def close(self) -> None: ...


def copies(source: str, target: str, *names: bytes) -> BlockCopies:
    ids = np.arange(len(names), dtype=np.int32)
    return BlockCopies(0, source, target, ids, ids, names)  # type: ignore[arg-type]


@pytest.mark.timeout(120)
def test_a_writer_that_hangs_holds_up_neither_reads_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine.disk.copier.CLOSE_S", 0.05)
    hanging, host = HangingFile(), HostBlocks(2, (12,), torch.int64)
    store = BlockStore(hanging, hanging, num_slots=SLOTS, block_bytes=BYTES, name_bytes=NAME)
    copier = DiskCopier(store, [host], near=None)  # type: ignore[arg-type]
    writing, reading = copier.copy(copies("host", "disk", name(1))), copier.copy(copies("disk", "host", name(1)))
    with pytest.raises(OSError, match="nothing was written"):
        reading.wait()
    assert not writing.done()
    copier.close()
    hanging.go.set()
    writing.wait()


def test_blocks_go_through_host_memory_in_all_its_parts(tmp_path: Path) -> None:
    pools = [HostBlocks(2, (8,), torch.int64), HostBlocks(2, (4,), torch.int64)]
    copier = DiskCopier(opened(tmp_path), pools, near=None)  # type: ignore[arg-type]
    for number, pool in enumerate(pools):
        pool.chunks[0][:] = torch.arange(2)[:, None] + 10 * number
    wanted = [pool.chunks[0].clone() for pool in pools]
    copier.copy(copies("host", "disk", name(1), name(2))).wait()
    for pool in pools:
        pool.chunks[0].zero_()
    copier.copy(copies("disk", "host", name(1), name(2))).wait()
    assert all(torch.equal(pool.chunks[0], one) for pool, one in zip(pools, wanted, strict=True))
    copier.close()


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"memory__kv_disk": "/d"}, "set both or none"),
        ({"memory__kv_disk_key": "/k"}, "--kv-disk, which is not set"),
        ({"memory__kv_disk_gib": 1}, "set both or none"),
        ({"memory__kv_disk": "/d", "memory__kv_disk_gib": 1}, "set --kv-host-gib too"),
        ({"memory__kv_disk": "/d", "memory__kv_disk_gib": 1, "memory__kv_host_gib": 1, "plan__mirror": True}, "mirror"),
    ],
)
def test_incomplete_settings_are_refused(given: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        replace(Config(), **given)
