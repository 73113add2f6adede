"""Free memory of a machine, of a container and of nested control groups, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.host.free_memory import GroupMemory, available_bytes, tightest_group, total_bytes

GIB = 1 << 30


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """/proc of a machine with 8 GiB available, and /sys/fs/cgroup without any group."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    return proc, cgroups


def write_group(folder: Path, limit: int | str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\nfile {cached}\nactive_file {cached}\ninactive_file 0\n")


def test_a_machine_without_groups(roots: tuple[Path, Path]) -> None:
    assert available_bytes(*roots) == 8 * GIB
    assert tightest_group(*roots) is None


def test_unknown_is_zero(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) == 0
    assert total_bytes(tmp_path, tmp_path) == 0


def test_the_whole_memory_is_the_machines_or_the_containers(roots: tuple[Path, Path]) -> None:
    assert total_bytes(*roots) == 16 * GIB
    write_group(roots[1], 4 * GIB, 3 * GIB, 0)
    assert total_bytes(*roots) == 4 * GIB


def test_cached_pages_of_a_container_are_free(roots: tuple[Path, Path]) -> None:
    write_group(roots[1], limit=4 * GIB, used=4 * GIB - 1, cached=3 * GIB)
    assert tightest_group(*roots) == GroupMemory(4 * GIB, GIB - 1)
    assert available_bytes(*roots) == 3 * GIB + 1


def test_a_limit_above_the_machines_memory_adds_nothing(roots: tuple[Path, Path]) -> None:
    write_group(roots[1], limit=64 * GIB, used=GIB, cached=0)
    assert available_bytes(*roots) == 8 * GIB


def test_the_tightest_of_nested_groups_counts(roots: tuple[Path, Path]) -> None:
    proc, cgroups = roots
    (proc / "self" / "cgroup").write_text("0::/user/work\n")
    write_group(cgroups / "user", limit=5 * GIB, used=3 * GIB, cached=0)
    write_group(cgroups / "user" / "work", limit="max", used=2 * GIB, cached=0)
    assert available_bytes(*roots) == 2 * GIB
    write_group(cgroups / "user" / "work", limit=3 * GIB, used=2 * GIB, cached=0)
    assert available_bytes(*roots) == GIB


def test_a_path_of_the_host_leaves_the_containers_root(roots: tuple[Path, Path]) -> None:
    (roots[0] / "self" / "cgroup").write_text("0::/../../system.slice/docker-1\n")
    write_group(roots[1], limit=2 * GIB, used=GIB, cached=0)
    assert available_bytes(*roots) == GIB


def test_the_first_version_of_control_groups(roots: tuple[Path, Path]) -> None:
    proc, cgroups = roots
    (proc / "self" / "cgroup").write_text("11:cpu,cpuacct:/x\n9:memory:/docker/1\n0::/\n")
    folder = cgroups / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.stat").write_text(f"cache 9\ntotal_active_file {GIB // 2}\ntotal_inactive_file {GIB // 2}\n")
    assert available_bytes(*roots) == 2 * GIB
    (folder / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert available_bytes(*roots) == 8 * GIB
