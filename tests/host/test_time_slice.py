"""Latency-bound threads ask for short slices; compute threads do not inherit them."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from millrace.host.time_slice import LONG_NS, SHORT_NS, own_slice_ns, request_default_slices, request_short_slices
from millrace.run.device.device import CpuDevice


def in_thread(work: Callable[[], None]) -> list[int | None]:
    """The slices of a new thread before and after `work`."""
    seen: list[int | None] = []

    def run() -> None:
        request_default_slices()  # An engine that another test ran in this thread has left it short ones.
        seen.append(own_slice_ns())
        work()
        seen.append(own_slice_ns())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return seen


@pytest.fixture
def usual() -> int:
    before, after = in_thread(request_short_slices)
    if before in (None, 0) or after != SHORT_NS:
        pytest.skip("this system has no slices that a thread can choose (Linux 6.12 and later)")
    assert before is not None
    return before


def test_slice_is_set_for_one_thread(usual: int) -> None:
    assert in_thread(request_short_slices) == [usual, SHORT_NS]

    def there_and_back() -> None:
        request_short_slices()
        request_default_slices()

    before = own_slice_ns()
    assert in_thread(there_and_back) == [usual, usual]
    assert own_slice_ns() == before, "only that thread has changed"


def test_compute_threads_have_long_slices(usual: int) -> None:
    """Longer than the default, also if the thread that starts them has short slices."""
    assert usual < LONG_NS
    device = CpuDevice(1)
    found: list[int | None] = []

    def loop() -> None:
        request_short_slices()
        found.append(device.launch(own_slice_ns, lambda slice_ns: slice_ns).wait())

    assert in_thread(loop) == [usual, SHORT_NS]
    assert found == [LONG_NS]
    device.close()


@pytest.mark.live
def test_policy_and_niceness_are_kept() -> None:
    code = (
        "import os; os.nice(5); os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0));"
        "from millrace.host.time_slice import request_short_slices; request_short_slices();"
        "print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_BATCH)"
    )
    if sys.platform != "linux":
        pytest.skip("niceness and policies are Linux's here")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(os.nice(0) + 5), "True"]
