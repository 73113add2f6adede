"""How much memory this process can still take: of the machine, and of its control group (a container's limit).

The kernel counts the cached pages of files to a group and drops them when the group needs memory, so they are free
here: after the weights of a model were read, a container would look full otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""The first version of control groups writes a number of this size where there is no limit."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A control group's memory, in bytes."""

    limit: int
    used: int
    """Without cached pages of files, which the kernel takes back when it must."""

    @property
    def free(self) -> int:
        return max(self.limit - self.used, 0)


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Memory that this process can still take; 0 = unknown."""
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
        available = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
    group = tightest_group(proc, cgroups)
    return min(available, group.free) if group is not None else available


def total_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Memory that this process could take if nothing else ran; 0 = unknown."""
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
        total = int(fields["MemTotal"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
    return min((group.limit for group in _limited_groups(proc, cgroups)), default=total)


def tightest_group(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> GroupMemory | None:
    """Of the control groups that this process is in, the one with the least memory left; None without any limit."""
    return min(_limited_groups(proc, cgroups), key=lambda group: group.free, default=None)


def _limited_groups(proc: Path, cgroups: Path) -> Iterator[GroupMemory]:
    for folder, limit_file, used_file, cached in _group_files(proc, cgroups):
        try:
            limit = int((folder / limit_file).read_text(encoding="ascii"))
            used = int((folder / used_file).read_text(encoding="ascii"))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):  # Absent, or "max".
            continue
        if limit < _NO_LIMIT:
            counts = dict(line.split(None, 1) for line in lines)
            yield GroupMemory(limit, max(used - sum(int(counts.get(name, 0)) for name in cached), 0))


def _group_files(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str, str, tuple[str, str]]]:
    """Of each group from this process's own up to the root: its folder, the files with limit and use, and the names
    of cached pages in `memory.stat`. In a container the path may be the host's; then only the root is there."""
    second = ("memory.max", "memory.current", ("active_file", "inactive_file"))
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
    own_path = first_path = "/"
    try:
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                own_path = path
            elif "memory" in controllers.split(","):
                first_path = path
    except (OSError, ValueError):
        pass
    for root, path, names in ((cgroups, own_path, second), (cgroups / "memory", first_path, first)):
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, *names
            if folder == root:
                break
