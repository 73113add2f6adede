"""Main module of a rank's process: `python -m millrace.engine.ranks.rank_child RANK RING_FDS... MESH_FDS...`.

Reads one JSON line of settings from standard input, then the records of rank 0 from shared memory. It ends when rank 0
does, or when a rank is lost.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from millrace.config import from_dict
from millrace.engine.disk.share import DiskShare
from millrace.engine.ranks.group import DIFFERENT, FAILED, OF_DISK, READY, SAME
from millrace.engine.ranks.make import adapter_shard, runner_from
from millrace.errors import MillraceError
from millrace.host.time_slice import request_default_slices
from millrace.observe.logs import setup_logging
from millrace.run.device.device import open_device
from millrace.run.ranks.device_mesh import open_mesh
from millrace.run.ranks.rank_follower import RankFollower
from millrace.run.ranks.recorder import RecordReader, RunnerSetup
from millrace.run.ranks.ring import RingClosed, RingReader
from millrace.run.ranks.shared_mesh import MeshLink, RankLost
from millrace.run.ranks.slot_pieces import SlotReceiver


def main() -> None:
    request_default_slices()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, ring_fds, mesh_fds = int(sys.argv[1]), map(int, sys.argv[2:4]), [int(fd) for fd in sys.argv[4:]]
    _name_process(f"millrace-rank{rank}")
    ring = RingReader(*ring_fds)
    config = from_dict(json.loads(sys.stdin.buffer.readline()))
    setup_logging(config.observe.log_level, process=f"rank {rank}")
    device, disk = open_device(config.run, rank), None
    mesh = open_mesh(MeshLink.from_fds(rank, mesh_fds[0], mesh_fds[1:]), device)
    try:
        records = RecordReader()
        setup = records.read(*ring.read())
        if not isinstance(setup, RunnerSetup):
            raise TypeError("the first record says how the runner is made")
        runner = runner_from(setup, device, mesh)
        if setup.disk_slots:
            reply = partial(ring.reply, OF_DISK)
            disk = DiskShare(config, rank, setup.disk, setup.disk_slots, runner.host_blocks, reply)
        pieces = SlotReceiver(runner, lambda: adapter_shard(setup, mesh))
        takes_disk = None if disk is None else disk.take
        follower = RankFollower(runner, pieces.take, takes_disk, proposes=device.defaults.pads_drafts, check=mesh.check)
        mesh.beat()
        ring.reply(READY, runner.facts.shapes.digest.encode())
        follow(ring, records, follower, lambda sentence: f"{sentence} on rank {rank} and rank 0.")
    except (RingClosed, RankLost):
        pass  # Rank 0 has ended, or says which rank is lost.
    except Exception as error:
        logging.getLogger(__name__).exception("rank %d ends", rank)
        reason = error.message if isinstance(error, MillraceError) else repr(error)
        ring.reply(FAILED, f"Rank {rank} of {mesh.size} has failed: {reason}".encode())
    finally:
        mesh.close()
        if disk is not None:
            disk.close()
        device.close()


def follow(ring: RingReader, records: RecordReader, follower: RankFollower, name: Callable[[str], str]) -> None:
    """Until the first difference. Raises `RingClosed`."""
    while True:
        difference = follower.take(records.read(*ring.read()))
        if difference is None:
            continue
        if difference:
            ring.reply(DIFFERENT, name(difference).encode())
            return
        ring.reply(SAME)


def _name_process(name: str) -> None:
    """At most 15 bytes."""
    try:
        Path("/proc/self/comm").write_text(name, encoding="ascii")
    except OSError:
        return


if __name__ == "__main__":
    main()
    os._exit(0)  # Threads of the mesh may still wait.
