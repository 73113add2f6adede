"""The cores this process may use: affinity mask, container CPU quota, NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def memory_nodes(root: Path = Path("/")) -> list[set[int]]:
    """The cores of the affinity mask by NUMA node, largest node first. Reading memory of another node takes about twice
    as long."""
    mine = _affinity()
    nodes = []
    for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist")):
        try:
            nodes.append(_parse_list(path.read_text()) & mine)
        except (OSError, ValueError):
            continue
    listed = set().union(*nodes)
    nodes.append(mine - listed)
    return sorted(filter(None, nodes), key=len, reverse=True)


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _parse_list(text: str) -> set[int]:
    """`0-3,8,10-11`"""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores this process may use: its affinity mask, limited by the CPU quotas of its control groups.

    Quotas are rounded down: one more thread would be throttled. `root` is where /proc and /sys are found (for tests).
    """
    return max(1, min([len(_affinity()), *(int(quota) for quota in _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPU quotas, in cores, of this process's control group and all its parents, for cgroup v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {"": "/", "cpu": "/"}  # In a container its own group may be the root, whatever /proc says.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths["cpu" if "cpu" in controllers.split(",") else controllers] = path
    top = root / "sys/fs/cgroup"
    for folder in _upwards(top, paths[""]):
        yield from _quota(folder / "cpu.max")
    for mount in ("cpu", "cpu,cpuacct"):
        for folder in _upwards(top / mount, paths["cpu"]):
            yield from _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")


def _upwards(top: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _quota(*files: Path) -> Iterator[float]:
    """Quota over period, in cores; nothing if there is no limit."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
    except (OSError, ValueError):
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)
