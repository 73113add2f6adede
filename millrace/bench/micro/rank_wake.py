"""How soon another rank has a plan: `python -m millrace.bench.micro.rank_wake --rounds 500 --bytes 100,4000`.

A process waits at the ring of `run/ranks/ring.py` and notes when it has each record; both read the same clock. Between
records the writer pauses as long as a short step, so that the reader sleeps.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

from millrace.run.ranks.ring import RingClosed, RingReader, RingWriter

PAUSE_S = 0.003
WARM_UP_ROUNDS = 20
LIMIT_S = 30.0
_TIME = struct.Struct("<q")
ARRIVED = 1


@dataclass(frozen=True, slots=True)
class WakeTimes:
    num_bytes: int
    median_us: float
    """From the call that writes a record until the other process has its bytes."""
    p99_us: float


def measure_wake(num_bytes: int, rounds: int) -> WakeTimes:
    ring = RingWriter()
    fds = ring.far_fds
    reader = subprocess.Popen(
        [sys.executable, "-m", "millrace.bench.micro.rank_wake", "--read", *map(str, fds)], pass_fds=fds
    )
    ring.started()
    try:
        times = [_round(ring, bytes(num_bytes)) for _ in range(WARM_UP_ROUNDS + rounds)][WARM_UP_ROUNDS:]
    finally:
        ring.close()
        reader.wait(LIMIT_S)
    return WakeTimes(num_bytes, statistics.median(times), statistics.quantiles(times, n=100)[98])


def _round(ring: RingWriter, data: bytes) -> float:
    time.sleep(PAUSE_S)
    began = time.monotonic_ns()
    ring.write(0, data, LIMIT_S)
    (arrived,) = _TIME.unpack(ring.read_reply().body)
    return float(arrived - began) / 1e3


def _read(memory_fd: int, socket_fd: int) -> None:
    ring = RingReader(memory_fd, socket_fd)
    with contextlib.suppress(RingClosed):
        while True:
            ring.read()
            ring.reply(ARRIVED, _TIME.pack(time.monotonic_ns()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time until another rank has a plan.")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--bytes", default="100,4000,100000", help="sizes of records, separated by commas")
    parser.add_argument("--read", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        _read(*args.read)
        return
    for size in map(int, args.bytes.split(",")):
        found = measure_wake(size, args.rounds)
        print(f"{found.num_bytes:>8} bytes: median {found.median_us:6.1f} us, 99th percentile {found.p99_us:6.1f} us")


if __name__ == "__main__":
    main()
