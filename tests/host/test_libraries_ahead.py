"""Libraries are read before they are loaded: only the parts that loading touches, and only if not cached."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.config import load_config
from millrace.host import libraries_ahead, page_reader
from millrace.supervise import engine_process as process

MB = 1 << 20
LOADED, IN_FILE, NOT_IN_FILE = 2, 1, 8
SECTIONS_TOUCHED = (".dynsym", ".text", ".rodata", ".data")


def make_library(path: Path, sections: list[tuple[str, int, int, int]]) -> dict[str, tuple[int, int]]:
    """Write an ELF file with sections (name, type, flags, bytes), each at a piece boundary; returns their spans."""
    names, rows, places = b"\0", [b"\0" * 64], {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.seek(page_reader.PIECE_BYTES)
        for name, kind, flags, num_bytes in sections:
            begin = -(-file.tell() // page_reader.PIECE_BYTES) * page_reader.PIECE_BYTES
            rows.append(struct.pack("<IIQQQQ16x", len(names), kind, flags, 0, begin, num_bytes) + b"\0" * 8)
            names += name.encode() + b"\0"
            places[name] = begin, begin + num_bytes
            if kind != NOT_IN_FILE:
                file.seek(begin)
                file.write(b"code" * (num_bytes // 4))
        rows.append(struct.pack("<IIQQQQ16x", 0, 3, 0, 0, file.tell(), len(names)) + b"\0" * 8)
        file.write(names)
        table_at = file.tell()
        file.write(b"".join(rows))
        file.seek(0)
        file.write(b"\x7fELF\x02\x01" + b"\0" * 34 + struct.pack("<Q10xHHH", table_at, 64, len(rows), len(rows) - 1))
        file.flush()
        os.fsync(file.fileno())
    return places


@pytest.fixture
def library(tmp_path: Path) -> tuple[Path, dict[str, tuple[int, int]]]:
    path = tmp_path / "site" / "torch" / "lib" / "libtorch_cpu.so"
    places = make_library(
        path,
        [
            (".dynsym", IN_FILE, LOADED, 5000),
            (".text", IN_FILE, LOADED, 12 * MB),
            (".rodata", IN_FILE, LOADED, 3 * MB),
            (".nv_fatbin", IN_FILE, LOADED, 4 * MB),
            (".bss", NOT_IN_FILE, LOADED, 1 << 40),
            (".data", IN_FILE, LOADED, 7 * MB),
            (".debug_info", IN_FILE, 0, 4 * MB),
        ],
    )
    return path, places


def forget(path: Path) -> None:
    """Drop the file from the page cache; skip the test where that has no effect (tmpfs)."""
    for _ in range(40):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
        if not held_pieces(path)[1]:
            return
        time.sleep(0.05)  # pages being written or read cannot be dropped
    pytest.skip("this system does not drop cached pages")


def held_pieces(path: Path) -> tuple[set[int], set[int]]:
    """The pieces of the file that are fully and partly in memory (mincore, reads nothing)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        num_pages = -(-len(view) // mmap.PAGESIZE)
        flags = ctypes.create_string_buffer(num_pages)
        begin, num_bytes = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view))
        answer = ctypes.CDLL(None, use_errno=True).mincore(begin, num_bytes, flags)
        del first
    if answer != 0:
        pytest.skip("this system does not report cached pages")
    step = page_reader.PIECE_BYTES // mmap.PAGESIZE
    pieces = [[flag & 1 for flag in flags.raw[at : at + step]] for at in range(0, num_pages, step)]
    return {n for n, held in enumerate(pieces) if all(held)}, {n for n, held in enumerate(pieces) if any(held)}


def read_until_held(read: Callable[[], object], wanted: set[int], path: Path) -> None:
    """`read` brings these pieces of the file into memory. Tried several times, because asking whether a page is cached
    can start reading it; skipped on a machine so loaded that the page is usually there when the answer is given."""
    for _ in range(8):
        forget(path)
        read()
        if wanted <= held_pieces(path)[0]:
            return
    for _ in range(20):
        forget(path)
        with path.open("rb") as file:
            if any(page_reader.is_in_memory(file.fileno(), piece * page_reader.PIECE_BYTES) for piece in wanted):
                pytest.skip("missing pages are read before this machine says that they are missing")
    pytest.fail("pieces of the file were not read")


def pieces_of(*spans: tuple[int, int]) -> set[int]:
    size = page_reader.PIECE_BYTES
    return {piece for begin, end in spans for piece in range(begin // size, -(-end // size))}


def touched_pieces(at: dict[str, tuple[int, int]], head_bytes: int) -> set[int]:
    """Touched pieces of the file that `library` makes, if code and data heads are equally long."""
    places = [at[name] for name in SECTIONS_TOUCHED]
    tails = [(max(begin + head_bytes, end - page_reader.TAIL_BYTES), end) for begin, end in places]
    return pieces_of(*((begin, min(end, begin + head_bytes)) for begin, end in places), *tails)


def test_touched_spans_are_heads_and_tails_of_sections(
    library: tuple[Path, dict[str, tuple[int, int]]],
) -> None:
    path, at = library
    file = os.open(path, os.O_RDONLY)
    try:
        spans = page_reader.touched_spans(file, code_bytes=2 * MB, data_bytes=5 * MB)
    finally:
        os.close(file)
    code, data = at[".text"], at[".data"]
    assert spans == [
        at[".dynsym"],
        (code[0], code[0] + 2 * MB),
        (code[1] - page_reader.TAIL_BYTES, code[1]),
        at[".rodata"],
        (data[0], data[0] + 5 * MB),
        (data[0] + 5 * MB, data[1]),
    ], "no binaries for the GPU, nothing that is not loaded, nothing twice"


@pytest.mark.live
@pytest.mark.alone
def test_only_missing_parts_are_read(library: tuple[Path, dict[str, tuple[int, int]]]) -> None:
    path, at = library
    touched = touched_pieces(at, 2 * MB)
    num_read: list[int] = []
    read_until_held(lambda: num_read.append(page_reader.read_ahead(str(path), 2 * MB, 2 * MB)), touched, path)
    begun, num_bytes = held_pieces(path)[1], num_read[-1]
    last = path.stat().st_size // page_reader.PIECE_BYTES
    assert begun <= touched | {0, last}, "other pieces: only the header and the section table"
    assert num_bytes == len(touched) * page_reader.PIECE_BYTES


def test_cached_parts_are_not_read(
    library: tuple[Path, dict[str, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, at = library
    asked: list[int] = []

    def note(file: int, offset: int) -> bool:
        asked.append(offset)
        return True

    monkeypatch.setattr(page_reader, "is_in_memory", note)
    assert page_reader.read_ahead(str(path), 2 * MB, 2 * MB) == 0
    size = page_reader.PIECE_BYTES
    ends = [(piece * size, piece * size + size - 1) for piece in sorted(touched_pieces(at, 2 * MB))]
    assert asked == [offset for pair in ends for offset in pair]


def test_read_page_is_in_memory(library: tuple[Path, dict[str, tuple[int, int]]]) -> None:
    file = os.open(library[0], os.O_RDONLY)
    try:
        os.pread(file, 1, MB)
        with contextlib.suppress(OSError):
            os.preadv(file, [bytearray(1)], MB, os.RWF_NOWAIT)
            assert page_reader.is_in_memory(file, MB)
    finally:
        os.close(file)
    assert not page_reader.is_in_memory(file, MB), "a file that mincore cannot query"


def test_whole_file_is_read_up_to_the_limit(
    library: tuple[Path, dict[str, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = library
    monkeypatch.setattr(page_reader, "is_in_memory", lambda file, offset: False)
    assert page_reader.read_ahead(str(path), libraries_ahead.WHOLE, 0) == path.stat().st_size
    assert page_reader.read_ahead(str(path), 2 * MB, 5 * MB, max_bytes=3 * MB) == 3 * MB
    assert page_reader.read_ahead(str(path), 2 * MB, 5 * MB, max_bytes=0) == 0


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n" * 100, b"\x7fELF\x01\x01" + b"\0" * 100])
def test_nothing_is_read_of_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libodd.so"
    path.write_bytes(content)
    assert page_reader.read_ahead(str(path), MB, MB) == 0


def broken_libraries(folder: Path) -> list[Path]:
    """Files with an ELF header but invalid content or sections."""
    chance, paths = random.Random(5), []
    for number in range(24):
        header = bytearray(b"\x7fELF\x02\x01" + chance.randbytes(58))
        if number % 2:
            header[40:48], header[58:64] = struct.pack("<Q", 64), struct.pack("<HHH", 64, 40, chance.randrange(50))
        paths.append(folder / f"libbroken{number}.so")
        paths[-1].write_bytes(bytes(header) + chance.randbytes(4096))
    return paths


@pytest.mark.live
@pytest.mark.alone
def test_script_skips_unreadable_files(library: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    path, at = library
    if page_reader.available_bytes() < page_reader.MIN_AVAILABLE_BYTES:
        pytest.skip("too little memory is available for anything to be read ahead")
    others = [tmp_path / "gone.so", tmp_path, *broken_libraries(tmp_path)]
    wishes = [word for wish in [*others, path] for word in (str(MB), str(MB), str(wish))]

    def read() -> None:
        done = subprocess.run(
            [sys.executable, "-I", "-S", page_reader.__file__, *wishes], capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    read_until_held(read, touched_pieces(at, MB), path)


def test_nothing_is_read_with_little_available_memory(
    library: tuple[Path, dict[str, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = library
    asked: list[str] = []

    def note(name: str, *_: int) -> int:
        asked.append(name)
        return 0

    monkeypatch.setattr(page_reader, "read_ahead", note)
    monkeypatch.setattr(sys, "argv", ["page_reader.py", "1", "1", str(path)])
    monkeypatch.setattr(page_reader, "available_bytes", lambda: page_reader.MIN_AVAILABLE_BYTES - 1)
    page_reader.main()
    assert asked == []
    monkeypatch.setattr(page_reader, "available_bytes", lambda: page_reader.MIN_AVAILABLE_BYTES)
    page_reader.main()
    assert asked == [str(path)]


@pytest.mark.live
@pytest.mark.alone
def test_libraries_next_to_a_package_are_read_without_importing_it(
    library: tuple[Path, dict[str, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, at = library
    site = path.parents[2]
    (site / "some_package").mkdir()
    (site / "some_package" / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    monkeypatch.syspath_prepend(str(site))
    if page_reader.available_bytes() < page_reader.MIN_AVAILABLE_BYTES:
        pytest.skip("too little memory is available for anything to be read ahead")

    def read() -> None:
        reading = libraries_ahead.read_libraries_ahead("some_package")
        assert reading is not None
        reading.join(60)
        assert not reading.is_alive()

    read_until_held(read, pieces_of(at[".text"], at[".data"]), path)


def test_missing_package_reads_no_libraries() -> None:
    assert libraries_ahead.read_libraries_ahead("no_such_package_at_all") is None


@pytest.mark.parametrize(("device", "has_gpu", "expected"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)])
def test_libraries_are_read_only_for_a_gpu_engine(
    monkeypatch: pytest.MonkeyPatch, device: str, has_gpu: bool, expected: int
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(process, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(process, "read_libraries_ahead", lambda: calls.append("read"))
    monkeypatch.setattr(process, "EngineProcess", lambda config, spare: calls.append("engine"))
    process.start_engine(load_config(None, {"run.device": device}).config)
    assert calls == ["engine"] + ["read"] * expected, "the engine starts before the libraries are read"
