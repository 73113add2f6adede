"""Rank 0's side of a model that is split over processes (`--tensor-parallel`): starts the other ranks, sends them what
it records, and ends the engine when one of them is lost."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from queue import SimpleQueue

from millrace.config import Config, as_dict
from millrace.errors import ConfigError
from millrace.host.children import EXIT_LIMIT_S, end_of
from millrace.run.device.device import Device
from millrace.run.ranks.device_mesh import open_mesh
from millrace.run.ranks.ring import RingClosed, RingWriter
from millrace.run.ranks.shared_mesh import BEAT_S, STALL_BEATS, MeshLink, RankLost, make_links

log = logging.getLogger(__name__)

CHILD = "millrace.engine.ranks.rank_child"
LOAD_LIMIT_S = 900.0
"""All ranks read their weights at once."""
WRITE_LIMIT_S = 60.0
"""The ring holds many steps: a rank that takes nothing for so long has stalled."""
READY, SAME, DIFFERENT, FAILED, OF_DISK = 1, 2, 3, 4, 5
"""Kinds of replies: the runner is made, with the digest of its shapes; a step's draws are equal; a sentence that names
a difference; the reason why the rank ends; a `DiskReply`."""


class RankProcess:
    """One of the other ranks."""

    def __init__(self, config: Config, link: MeshLink) -> None:
        self.rank = link.rank
        self.ring = RingWriter()
        fds = [*self.ring.far_fds, *link.fds()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(link.rank), *map(str, fds)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C must reach only the front, which then drains.
        )
        self.ring.started()
        link.close()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(as_dict(config)).encode() + b"\n")
        self.process.stdin.close()
        self.is_ready = False
        self.digest = ""


class RankGroup:
    """A sink of records. `mesh`: rank 0's."""

    def __init__(self, config: Config, device: Device, *, load_limit_s: float = LOAD_LIMIT_S) -> None:
        """Starts the processes. `wait_until_ready` before the first step."""
        self.size = config.run.tensor_parallel
        self._load_limit_s = load_limit_s
        links = make_links(self.size)
        self.mesh = open_mesh(links[0], device)
        self.num_same = 0
        """Steps whose draws were equal, summed over the ranks."""
        self.disk_replies: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        """The rank, and what it says of its disk."""
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._lost = ""
        """Why the ranks cannot go on."""
        self.others = [RankProcess(config, link) for link in links[1:]]
        for other in self.others:
            threading.Thread(target=self._listen, args=(other,), name=f"rank-{other.rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return [other.process.pid for other in self.others]

    def wait_until_ready(self, digest: str) -> None:
        """`digest`: of the shapes that rank 0 declares. Raises a ConfigError if a rank does not start, or declares
        others."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or all(one.is_ready for one in self.others), self._load_limit_s)
        late = [str(other.rank) for other in self.others if not other.is_ready]
        others = [str(other.rank) for other in self.others if other.is_ready and other.digest != digest]
        if self._lost or late or others:
            self.close()
            reason = self._lost or (
                f"Rank {late[0]} was not ready within {self._load_limit_s:g} s."
                if late
                else f"Rank {others[0]} declares other step shapes than rank 0, so it cannot run the same plans. All"
                " ranks must run on the same kind of device, with the same installation of Millrace."
            )
            raise ConfigError(
                f"The ranks (--tensor-parallel {self.size}) did not start: {reason}", param="tensor_parallel"
            )
        self.mesh.beat()
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def check(self) -> None:
        """Raises `RankLost` if a rank is lost: the engine must end. A step may find it before other threads do."""
        if reason := self.mesh.lost:
            if self.mesh.found_ended:
                with self._changed:  # The thread that listens knows the exit code.
                    self._changed.wait_for(lambda: bool(self._lost), EXIT_LIMIT_S)
            self._lose(reason)
        if self._lost:
            raise RankLost(f"{self._lost} The engine ends with it.")

    def write(self, kind: int, data: bytes) -> None:
        for other in self.others:
            try:
                other.ring.write(kind, data, WRITE_LIMIT_S)
            except RingClosed:
                return  # The listening thread says so.
            except TimeoutError:
                self._lose(
                    f"Rank {other.rank} of {self.size} has stalled: it has taken no step for {WRITE_LIMIT_S:g} s."
                )

    def settle(self) -> None:
        """Nothing is compared later than it is sent."""

    def close(self) -> None:
        self._closing.set()
        self.mesh.close()
        for other in self.others:
            other.ring.close()
            other.process.kill()
        for other in self.others:
            end_of(other.process, f"rank {other.rank}")
        self.mesh.release()

    def _listen(self, other: RankProcess) -> None:
        try:
            while True:
                reply = other.ring.read_reply()
                if reply.kind in (DIFFERENT, FAILED):
                    self._lose(reply.body.decode())
                if reply.kind == OF_DISK:
                    self.disk_replies.put((other.rank, reply.body))
                with self._changed:
                    if reply.kind == READY:
                        other.is_ready, other.digest = True, reply.body.decode()
                    self.num_same += reply.kind == SAME
                    self._changed.notify_all()
        except RingClosed:
            if not self._closing.is_set() and not self._lost:
                code = end_of(other.process, f"rank {other.rank}")
                how = "its process has closed its connection" if code is None else f"its process has exit code {code}"
                self._lose(f"Rank {other.rank} of {self.size} has ended: {how}.")

    def _watch(self) -> None:
        """Finds ranks that stand still, also while no step runs."""
        beats = self.mesh.beats
        while not self._closing.is_set() and not self._lost:
            for other in self.others:
                if beats.has_stalled(other.rank):
                    limit_s = BEAT_S * STALL_BEATS
                    self._lose(f"Rank {other.rank} of {self.size} has stalled: no sign of it for {limit_s:g} s.")
            time.sleep(BEAT_S)

    def _lose(self, reason: str) -> None:
        """Say why, once, and end all other ranks: steps that wait for them fail at once."""
        with self._changed:
            if self._lost or self._closing.is_set():
                return
            self._lost = reason
            was_ready = all(other.is_ready for other in self.others)
            self._changed.notify_all()
        if was_ready:
            log.error("%s The engine ends with it.", reason)
        self.mesh.close()
        for other in self.others:
            other.ring.close()  # Who waits for room in it goes on.
            other.process.kill()
