"""Reads the parts of libraries that a process will touch into memory: `python page_reader.py CODE DATA PATH ...`.

For each path, CODE and DATA say how many bytes of the beginning of its code, and of each other section, to read; a
negative CODE means the whole file. Only what is not in memory is read, one piece at a time: whoever needs a small file
meanwhile, an interpreter that starts above all, waits for one piece and not for a queue. Whatever cannot be read is
passed over.

A script: it must be reading before the process that it reads for has imported anything, so it imports next to nothing.
"""

from __future__ import annotations

import os
import struct
import sys

PIECE_BYTES = 1 << 19
TAIL_BYTES = 4 << 20
"""Of code that is not read whole its end is read as well: initialisers tend to be at both."""
MOST_BYTES = 3 << 29
SPARE_BYTES = 8 << 30
"""A machine that has less memory available may need what would be thrown out: nothing is read ahead there."""

_CODE = b".text"
_UNTOUCHED = (b".nv_fatbin", b"__nv_relfatbin", b".cask_resource", b".eh_frame", b".eh_frame_hdr", b".gcc_except_table")
"""Binaries for the GPU, fetched one by one when they are launched, and tables for exceptions."""
_NOT_IN_FILE, _LOADED = 8, 2
_ROW_BYTES, _NAMES_BYTES = 64, 1 << 16
_ROW = struct.Struct("<IIQ8xQQ24x")
"""A section of an ELF file of 64 bits: where its name is, its type, its flags, where it is in the file, its size."""


def bring(path: str, code_bytes: int, data_bytes: int, most_bytes: int = MOST_BYTES) -> int:
    """Read what is missing; how many bytes that was."""
    num_bytes, buffer = 0, bytearray(PIECE_BYTES)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # what is asked for and no more
        for piece in _pieces(file, code_bytes, data_bytes):
            begin = piece * PIECE_BYTES
            is_held = piece and is_in_memory(file, begin) and is_in_memory(file, begin + PIECE_BYTES - 1)
            if num_bytes < most_bytes and not is_held:
                num_bytes += os.preadv(file, [buffer], begin)
    finally:
        os.close(file)
    return num_bytes


def _pieces(file: int, code_bytes: int, data_bytes: int) -> list[int]:
    """Each once, in the order of the sections. The first one holds the header and so always seems to be in memory."""
    spans = [(0, os.fstat(file).st_size)] if code_bytes < 0 else touched_spans(file, code_bytes, data_bytes)
    chosen = (piece for begin, end in spans for piece in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)))
    return list(dict.fromkeys(chosen))


def touched_spans(file: int, code_bytes: int, data_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of what a process touches of a library when it loads it; nothing of what is no library."""
    spans = []
    for name, begin, num_bytes in _loaded_sections(file):
        if name not in _UNTOUCHED:
            head_bytes = code_bytes if name == _CODE else data_bytes
            spans.append((begin, begin + min(num_bytes, head_bytes)))
            if num_bytes > head_bytes:
                spans.append((begin + max(head_bytes, num_bytes - TAIL_BYTES), begin + num_bytes))
    return spans


def _loaded_sections(file: int) -> list[tuple[bytes, int, int]]:
    """Name, begin and size of those that lie within the file."""
    header, file_bytes = os.pread(file, 64, 0), os.fstat(file).st_size
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return []
    (table_at,) = struct.unpack_from("<Q", header, 40)
    row_bytes, num_rows, names_row = struct.unpack_from("<HHH", header, 58)
    table = os.pread(file, row_bytes * num_rows, table_at) if row_bytes == _ROW_BYTES else b""
    rows = [_ROW.unpack_from(table, at) for at in range(0, len(table), _ROW_BYTES)]
    names = os.pread(file, min(rows[names_row][4], _NAMES_BYTES), rows[names_row][3])
    return [
        (names[name_at : names.index(b"\0", name_at)], begin, num_bytes)
        for name_at, kind, flags, begin, num_bytes in rows
        if kind != _NOT_IN_FILE and flags & _LOADED and begin + num_bytes <= file_bytes
    ]


def is_in_memory(file: int, offset: int) -> bool:
    """Whether this page is. No, where the file system cannot tell: reading what is there costs little. To ask for a
    page that is not has it read, so that one answer in some hundreds comes late enough to be yes."""
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except OSError:
        return False


def available_bytes() -> int:
    """Memory that can be had without taking it from anybody; 0 if the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def main() -> None:
    wishes, num_bytes = iter(sys.argv[1:]), 0
    if available_bytes() < SPARE_BYTES:
        return
    for code_bytes, data_bytes, path in zip(wishes, wishes, wishes, strict=True):
        try:
            num_bytes += bring(path, int(code_bytes), int(data_bytes), MOST_BYTES - num_bytes)
        except (OSError, OverflowError, struct.error, IndexError, ValueError):  # gone, or not what its name says
            continue


if __name__ == "__main__":
    main()
