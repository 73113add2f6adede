"""Parts of a prompt's blocks in memory that two replicas share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.serve.fetching.shared_part import SharedPart, is_on_this_machine, write_shared

DATA = bytes(range(256)) * 4


def test_a_part_is_what_was_written_or_nothing(tmp_path: Path) -> None:
    part = SharedPart(len(DATA), tmp_path)
    try:
        checksum = write_shared(part.name, DATA, tmp_path)
        assert checksum is not None
        assert part.read(len(DATA), checksum) == DATA
        assert part.read(len(DATA) - 1, checksum) is None
        assert part.read(len(DATA) + 1, checksum) is None
        assert write_shared(part.name, b"other", tmp_path)
        assert part.read(len(DATA), checksum) is None
        assert write_shared(part.name, DATA + b"x", tmp_path) is None, "it does not fit"
    finally:
        part.close()
    assert not list(tmp_path.iterdir())


def test_only_private_memory_with_such_a_name_is_written(tmp_path: Path) -> None:
    part = SharedPart(len(DATA), tmp_path)
    path, other = tmp_path / part.name, tmp_path / ("millrace-kv-" + "0" * 32)
    for name in ("", "../" + part.name, "/etc/passwd", other.name):
        assert write_shared(name, DATA, tmp_path) is None
    other.symlink_to(path)
    assert write_shared(other.name, DATA, tmp_path) is None
    path.chmod(0o644)
    assert write_shared(part.name, DATA, tmp_path) is None
    part.close()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, kept = tmp_path / ("millrace-kv-" + "a" * 32), tmp_path / "of somebody else"
    for path in (left, kept):
        path.touch()
        os.utime(path, (0, 0))
    SharedPart(1, tmp_path).close()
    assert list(tmp_path.iterdir()) == [kept]
    with pytest.raises(OSError, match="No such file"):
        SharedPart(1, tmp_path / "none")


@pytest.mark.live
def test_memory_is_shared_on_one_machine_only() -> None:
    assert all(map(is_on_this_machine, ("http://127.0.0.1:8000", "http://localhost:1", "https://127.0.0.1")))
    assert not any(
        map(is_on_this_machine, ("http://192.0.2.1:8000", "http://a.example", "http://", "http://[2001:db8::1]"))
    )
