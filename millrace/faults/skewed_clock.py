"""Runs a command of `millrace` whose wall clock jumps: SIGUSR1 an hour forward, SIGUSR2 two hours back.

`python -m millrace.faults.skewed_clock gateway --replicas …`. The monotonic clock goes on as it does on a machine whose
wall clock is set.
"""

from __future__ import annotations

import runpy
import signal
import time

FORWARD_S, BACK_S = 3600.0, -7200.0


def main() -> None:
    true_time, offsets = time.time, [0.0]

    def jump(number: int, frame: object) -> None:
        offsets.append(FORWARD_S if number == signal.SIGUSR1 else BACK_S)

    signal.signal(signal.SIGUSR1, jump)
    signal.signal(signal.SIGUSR2, jump)
    time.time = lambda: true_time() + sum(offsets)

    runpy.run_module("millrace", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
