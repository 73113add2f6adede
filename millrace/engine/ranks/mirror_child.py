"""Main module of the mirror's process: `python -m millrace.engine.ranks.mirror_child MEMORY_FD SOCKET_FD`.

Reads one JSON line of settings from standard input, then the records of rank 0 from shared memory. It ends when rank 0
does, or after the first difference: what follows would differ, too.
"""

from __future__ import annotations

import json
import signal
import sys

from millrace.config import from_dict
from millrace.engine.ranks.make import runner_from
from millrace.engine.ranks.mirror import DIFFERENT, ENDED, READY, SAME
from millrace.errors import MillraceError
from millrace.run.device.device import open_device
from millrace.run.ranks.follower import Follower
from millrace.run.ranks.recorder import RecordReader, RunnerSetup
from millrace.run.ranks.ring import RingClosed, RingReader
from millrace.run.ranks.slot_fills import fill_as_recorded


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ring = RingReader(int(sys.argv[1]), int(sys.argv[2]))
    config = from_dict(json.loads(sys.stdin.buffer.readline()))
    device = open_device(config.run)
    records = RecordReader()
    try:
        setup = records.read(*ring.read())
        if not isinstance(setup, RunnerSetup):
            raise TypeError("the first record says how the runner is made")
        runner = runner_from(setup, device)
        follower = Follower(runner, lambda record: fill_as_recorded(runner, record))
        ring.reply(READY, runner.facts.shapes.digest.encode())
        follow(ring, records, follower)
    except RingClosed:
        pass  # Rank 0 has ended.
    except MillraceError as error:
        ring.reply(ENDED, error.message.encode())
    finally:
        device.close()


def follow(ring: RingReader, records: RecordReader, follower: Follower) -> None:
    """Until the first difference. Raises `RingClosed`."""
    while True:
        followed = follower.take(records.read(*ring.read()))
        if followed is None:
            continue
        difference = followed.difference()
        if difference is not None:
            ring.reply(DIFFERENT, difference.encode())
            return
        ring.reply(SAME)


if __name__ == "__main__":
    main()
