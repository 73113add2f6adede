"""Number and cores of a CPU device's threads: as configured, or as many as the process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millrace.config import RunConfig
from millrace.host.cores import memory_nodes, usable_cores
from millrace.run.device import device as device_module
from millrace.run.device.device import CpuDevice, open_device


@pytest.fixture(autouse=True)
def _threads_of_torch() -> Iterator[None]:
    """A CPU device sets their number for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, 16),
        (
            {
                "proc/self/cgroup": "0::/pods/one/box\n",
                "sys/fs/cgroup/pods/one/box/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pods/one/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/pods/cpu.max": "800000 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_the_quota_of_a_container_is_respected(
    tmp_path: Path, many_cores: None, files: dict[str, str], cores: int
) -> None:
    assert usable_cores(put(tmp_path, files)) == cores


def test_the_affinity_mask_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 7, 11})
    assert usable_cores(tmp_path) == 3
    assert usable_cores(put(tmp_path, {"sys/fs/cgroup/cpu.max": "200000 100000"})) == 2


def test_the_configured_number_of_threads_is_used() -> None:
    device = open_device(RunConfig(device="cpu", threads=3))
    assert "3 threads" in device.name()
    assert torch.get_num_threads() == 3
    assert device.launch(torch.get_num_threads, lambda result: result).wait() == 3
    device.close()


@pytest.mark.parametrize(
    ("lists", "nodes"),
    [
        ({}, [set(range(16))]),
        ({"node0": "0-15\n"}, [set(range(16))]),
        ({"node0": "0-3,16-19\n", "node1": "4-15\n"}, [set(range(4, 16)), set(range(4))]),
        ({"node0": "0-1,4\n", "node1": "\n"}, [set(range(16)) - {0, 1, 4}, {0, 1, 4}]),
        ({"node0": "nonsense"}, [set(range(16))]),
    ],
)
def test_cores_are_grouped_by_numa_node(
    lists: dict[str, str], nodes: list[set[int]], many_cores: None, tmp_path: Path
) -> None:
    files = {f"sys/devices/system/node/{name}/cpulist": text for name, text in lists.items()}
    assert memory_nodes(put(tmp_path, files)) == nodes


@pytest.mark.parametrize(("asked", "threads", "stays"), [(0, 1, True), (1, 1, True), (2, 2, False)])
def test_threads_stay_on_one_numa_node(asked: int, threads: int, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.sched_getaffinity(0)
    home = {min(mine)}
    monkeypatch.setattr("millrace.run.device.device.memory_nodes", lambda: [home, mine - home])
    device = CpuDevice(asked)
    try:
        assert device.threads == threads
        seen = device.launch(lambda: os.sched_getaffinity(0), lambda cores: cores).wait()
        assert seen == (home if stays else mine)
        assert os.sched_getaffinity(0) == mine
    finally:
        device.close()


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx2", "avx512f", "avx512_vnni"}, torch.float32),
        ({"avx512f", "avx512_bf16"}, torch.bfloat16),
        ({"avx512f", "amx_bf16"}, torch.bfloat16),
        ({"asimddp"}, torch.float32),
        ({"asimddp", "i8mm", "bf16"}, torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_only_with_instructions_for_it(
    features: set[str], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "processor_features", lambda: frozenset(features))
    device = CpuDevice(1)
    try:
        assert device.defaults.dtype is expected
    finally:
        device.close()
