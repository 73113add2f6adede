"""A process of long steps gives way: with all its threads, and as a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millrace.host.background import BACKGROUND_NICE

pytestmark = pytest.mark.live

PROGRAM = """
import os, sys, threading
from pathlib import Path
from millrace.host.background import run_in_background

def nice():
    return os.getpriority(os.PRIO_PROCESS, 0) - before

before = os.getpriority(os.PRIO_PROCESS, 0)
found, may_look = [nice()], threading.Event()
early = threading.Thread(target=lambda: (may_look.wait(60), found.append(nice())))
early.start()
run_in_background(Path(sys.argv[1]))
found.append(nice())
may_look.set()
early.join(60)
late = threading.Thread(target=lambda: found.append(nice()))
late.start()
late.join(60)
print(*found)
"""


def test_all_threads_and_the_session_give_way(tmp_path: Path) -> None:
    """Those that run already, the calling one, and those started later; a system without autogroups is no error."""
    group = tmp_path / "autogroup"
    group.touch()
    for path in (group, tmp_path / "none" / "autogroup"):
        command = [sys.executable, "-c", PROGRAM, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == ["0", *[str(BACKGROUND_NICE)] * 3]
    assert group.read_text() == str(BACKGROUND_NICE)
