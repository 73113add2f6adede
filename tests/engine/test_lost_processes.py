"""Nobody waits without a bound for a process that has been killed, or for room in the ring of one."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.config import Config, RunConfig
from millrace.engine.ranks import group as group_module
from millrace.engine.ranks import mirror as mirror_module
from millrace.engine.ranks.group import RankGroup
from millrace.engine.ranks.mirror import Mirror
from millrace.run.device.device import CpuDevice
from millrace.run.ranks.ring import RING_BYTES

pytestmark = pytest.mark.live


@pytest.fixture
def idle_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks and mirrors are processes that hold their ends and do nothing."""
    (tmp_path / "idle_child.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for module in (group_module, mirror_module):
        monkeypatch.setattr(module, "CHILD", "idle_child")


def stuck(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
    """Of a process in the kernel, which no signal ends."""
    assert timeout is not None, "waits without a bound"
    raise subprocess.TimeoutExpired(process.args, timeout)


@pytest.mark.parametrize("kind", ["rank", "mirror"])
def test_closing_does_not_wait_for_a_process_that_cannot_end(
    kind: str, idle_child: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    make: Callable[[], Any] = lambda: RankGroup(Config(run=RunConfig(tensor_parallel=3)), CpuDevice(1))  # noqa: E731
    if kind == "mirror":
        make = lambda: Mirror(Config())  # noqa: E731
    with monkeypatch.context() as patched:
        create = subprocess.Popen.__init__

        def noted(self: subprocess.Popen[bytes], *args: Any, **options: Any) -> None:
            create(self, *args, **options)
            processes.append(self)

        patched.setattr(subprocess.Popen, "__init__", noted)
        opened = make()
        patched.setattr(subprocess.Popen, "wait", stuck)
        opened.close()
    assert caplog.text.count("has not ended within") >= len(processes) > 0
    for process in processes:
        assert process.wait(60) == -9


def test_who_waits_for_room_goes_on_when_the_rank_is_lost(idle_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "WRITE_LIMIT_S", 3600.0)
    group = RankGroup(Config(run=RunConfig(tensor_parallel=2)), CpuDevice(1))
    writer = threading.Thread(target=group.write, args=(1, bytes(2 * RING_BYTES)), daemon=True)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive(), "the ring has no room"
    group.others[0].process.kill()
    writer.join(60)
    assert not writer.is_alive()
    group.close()
