"""KV blocks on a disk: a file of blocks in slots of one size, and a file that says which block each slot holds.

An entry has the block's name and a checksum over name and content, so a block that was half written, damaged or moved
is never taken for another: it is unreadable. The content is written before its entry, and neither is synchronised: what
a power failure tears is unreadable too.
"""

from __future__ import annotations

import logging
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from millrace.engine.disk.files import BlockFile, FolderLock, OpenFile
from millrace.engine.disk.forms import CHECKSUM_BYTES, BlockForm, PlainForm
from millrace.errors import ConfigError
from millrace.plan.planner.block_names import mark_in

log = logging.getLogger(__name__)

PLAIN = PlainForm()
_ENTRY = struct.Struct(f"<Q{CHECKSUM_BYTES}s")
"""Number of the write, checksum of the block. The name and a checksum of the entry follow."""
_CHECK = struct.Struct("<I")


class UnreadableBlock(OSError):
    """The content is not what was written."""


def entry_bytes(name_bytes: int) -> int:
    return _ENTRY.size + name_bytes + _CHECK.size


class BlockStore:
    """Different slots may be used by several threads at once."""

    def __init__(
        self,
        blocks: BlockFile,
        entries: BlockFile,
        *,
        num_slots: int,
        block_bytes: int,
        name_bytes: int,
        lock: FolderLock | None = None,
        form: BlockForm = PLAIN,
    ) -> None:
        self.num_slots, self._form = num_slots, form
        self._slot_bytes, name_bytes = block_bytes + form.extra_bytes, name_bytes + form.extra_name_bytes
        self._blocks, self._entries, self._lock = blocks, entries, lock
        self._name_bytes, self._entry_bytes = name_bytes, entry_bytes(name_bytes)
        self._checksums = np.zeros((num_slots, CHECKSUM_BYTES), np.uint8)
        self._next_write = 1

    def stored(self) -> list[tuple[int, bytes]]:
        """Slot and name of each block that the files have, the oldest first. Call it once, before anything else."""
        found = sorted(self._read_entries())
        for _, slot, checksum, _ in found:
            self._checksums[slot] = np.frombuffer(checksum, np.uint8)
        self._next_write = found[-1][0] + 1 if found else 1
        return [(slot, name) for _, slot, _, name in found]

    def _read_entries(self) -> Iterator[tuple[int, int, bytes, bytes]]:
        for slot in range(self.num_slots):
            entry = bytearray(self._entry_bytes)
            try:
                self._entries.read(slot * self._entry_bytes, [memoryview(entry)])
            except OSError:
                return  # Slots from here on were never used.
            content, check = entry[: -_CHECK.size], _CHECK.unpack_from(entry, len(entry) - _CHECK.size)[0]
            number, checksum = _ENTRY.unpack_from(content)
            if number and zlib.crc32(content) == check:
                name = self._form.name_of(bytes(content[_ENTRY.size :]))
                if name is not None:
                    yield number, slot, checksum, name

    def write(self, slot: int, name: bytes, parts: Sequence[memoryview]) -> None:
        """Raises OSError."""
        stored_name, stored_parts, checksum = self._form.store(name, parts)
        self._blocks.write(slot * self._slot_bytes, stored_parts)
        content = _ENTRY.pack(self._next_write, checksum) + stored_name
        self._next_write += 1
        entry = content + _CHECK.pack(zlib.crc32(content))
        self._entries.write(slot * self._entry_bytes, [memoryview(entry)])
        self._checksums[slot] = np.frombuffer(checksum, np.uint8)

    def read(self, slot: int, name: bytes, parts: Sequence[memoryview]) -> None:
        """Raises OSError; then the parts have any content."""

        def read_slot(into: Sequence[memoryview]) -> None:
            self._blocks.read(slot * self._slot_bytes, into)

        if not self._form.load(name, parts, self._checksums[slot].tobytes(), read_slot):
            raise UnreadableBlock(f"the KV block in slot {slot} of the disk is damaged")

    def forget(self, mark: bytes) -> None:
        """Erase what the files have of the owner with this mark, and destroy its key. Not beside writes. Raises
        OSError."""
        for slot in [slot for _, slot, _, name in self._read_entries() if mark_in(name) == mark]:
            self._entries.write(slot * self._entry_bytes, [memoryview(bytes(self._entry_bytes))])
            self._blocks.write(slot * self._slot_bytes, [memoryview(bytes(self._slot_bytes))])
        for file in (self._entries, self._blocks):
            file.sync()
        self._form.forget(mark)

    def close(self) -> None:
        self._blocks.close()
        self._entries.close()
        if self._lock is not None:
            self._lock.close()


def open_store(
    folder: Path,
    *,
    num_slots: int,
    block_bytes: int,
    name_bytes: int,
    form: BlockForm = PLAIN,
    patience_s: float = 0.0,
) -> BlockStore | None:
    """The blocks of one model and format. None if the folder cannot be used, which costs time only. Raises ConfigError
    if another server uses it for longer than `patience_s`."""
    lock = None
    try:
        lock = FolderLock(folder, patience_s)
        if not lock.is_writable:
            log.warning("%s is read-only: KV blocks are read from it, but none is stored", folder)
        slot_bytes = block_bytes + form.extra_bytes
        sizes = {"blocks": slot_bytes, "entries": entry_bytes(name_bytes + form.extra_name_bytes)}
        files = [
            OpenFile(folder / name, num_slots * size, is_writable=lock.is_writable) for name, size in sizes.items()
        ]
        _warn_if_short(folder, num_slots * slot_bytes)
    except BlockingIOError as error:
        raise ConfigError(
            f"Another server keeps KV blocks of this model in {folder}. Give each server a directory of its own with"
            " --kv-disk, or stop the other one.",
            param="memory.kv_disk",
        ) from error
    except OSError as error:
        if lock is not None:
            lock.close()
        log.warning("no KV blocks are kept on a disk: %s. Check the directory of --kv-disk and its permissions.", error)
        return None
    return BlockStore(*files, num_slots=num_slots, block_bytes=block_bytes, name_bytes=name_bytes, lock=lock, form=form)


def _warn_if_short(folder: Path, wanted: int) -> None:
    used, free = (folder / "blocks").stat().st_blocks * 512, shutil.disk_usage(folder).free
    if used + free < wanted:
        gib = 1 << 30
        log.warning(
            "--kv-disk-gib asks for %.1f GiB in %s, but only %.1f GiB are free: once the disk is full, nothing more is"
            " stored. Lower --kv-disk-gib.",
            wanted / gib,
            folder,
            (used + free) / gib,
        )
