"""Reads parts of shared libraries into the page cache: `python page_reader.py CODE DATA PATH ...`.

For each path, CODE is the number of bytes to read from the start of its code section and DATA that of each other
section; a negative CODE means the whole file. It reads only what is not cached, one piece at a time, so that another
process (a starting interpreter above all) waits for one piece at most. Unreadable files are skipped.

This is a script with minimal imports: it must be reading before the process it helps has imported anything.
"""

from __future__ import annotations

import os
import struct
import sys

PIECE_BYTES = 1 << 19
TAIL_BYTES = 4 << 20
"""Also read at the end of a section that is not read whole: initialisers tend to be at both ends."""
MAX_BYTES = 3 << 29
MIN_AVAILABLE_BYTES = 8 << 30
"""With less available memory nothing is read: it could evict pages that are needed."""

_CODE = b".text"
_UNTOUCHED = (b".nv_fatbin", b"__nv_relfatbin", b".cask_resource", b".eh_frame", b".eh_frame_hdr", b".gcc_except_table")
"""GPU binaries, loaded one by one at first launch, and exception tables."""
_NOT_IN_FILE, _LOADED = 8, 2
_ROW_BYTES, _NAMES_BYTES = 64, 1 << 16
_ROW = struct.Struct("<IIQ8xQQ24x")
"""Section header of a 64-bit ELF file: name offset, type, flags, file offset, size."""


def read_ahead(path: str, code_bytes: int, data_bytes: int, max_bytes: int = MAX_BYTES) -> int:
    """Read the pieces that are not cached; returns the number of bytes read."""
    num_bytes, buffer = 0, bytearray(PIECE_BYTES)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # No read-ahead by the kernel.
        for piece in _pieces(file, code_bytes, data_bytes):
            begin = piece * PIECE_BYTES
            is_cached = piece and is_in_memory(file, begin) and is_in_memory(file, begin + PIECE_BYTES - 1)
            if num_bytes < max_bytes and not is_cached:
                num_bytes += os.preadv(file, [buffer], begin)
    finally:
        os.close(file)
    return num_bytes


def _pieces(file: int, code_bytes: int, data_bytes: int) -> list[int]:
    """Piece numbers, each once, in section order. Piece 0 holds the header, so it always looks cached."""
    spans = [(0, os.fstat(file).st_size)] if code_bytes < 0 else touched_spans(file, code_bytes, data_bytes)
    chosen = (piece for begin, end in spans for piece in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)))
    return list(dict.fromkeys(chosen))


def touched_spans(file: int, code_bytes: int, data_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of the parts that loading a library touches; empty if the file is not a library."""
    spans = []
    for name, begin, num_bytes in _loaded_sections(file):
        if name not in _UNTOUCHED:
            head_bytes = code_bytes if name == _CODE else data_bytes
            spans.append((begin, begin + min(num_bytes, head_bytes)))
            if num_bytes > head_bytes:
                spans.append((begin + max(head_bytes, num_bytes - TAIL_BYTES), begin + num_bytes))
    return spans


def _loaded_sections(file: int) -> list[tuple[bytes, int, int]]:
    """Name, file offset and size of each loaded section."""
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
    """True if the page at `offset` is cached; False if the file system cannot tell (reading a cached page is cheap).

    The check can start reading a missing page, so about one in several hundred calls returns True for such a page."""
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except OSError:
        return False


def available_bytes() -> int:
    """MemAvailable of /proc/meminfo; 0 if unknown."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def main() -> None:
    arguments, num_bytes = iter(sys.argv[1:]), 0
    if available_bytes() < MIN_AVAILABLE_BYTES:
        return
    for code_bytes, data_bytes, path in zip(arguments, arguments, arguments, strict=True):
        try:
            num_bytes += read_ahead(path, int(code_bytes), int(data_bytes), MAX_BYTES - num_bytes)
        except (OSError, OverflowError, struct.error, IndexError, ValueError):  # Missing, or not a valid ELF file.
            continue


if __name__ == "__main__":
    main()
