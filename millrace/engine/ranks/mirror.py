"""Rank 0's side of the mirror: a second process that runs every step from the same bytes and compares what it draws.

The mirror never fails a request. When it finds a difference, ends, or does not answer in time, it is ended, and the
engine goes on without it.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

from millrace.config import Config, as_dict
from millrace.errors import ConfigError
from millrace.host.children import end_of
from millrace.link.engine_stats import MirrorStats
from millrace.run.ranks.recorder import RESULT
from millrace.run.ranks.ring import RingClosed, RingWriter

log = logging.getLogger(__name__)

CHILD = "millrace.engine.ranks.mirror_child"
LOAD_LIMIT_S = 900.0
"""The mirror reads the weights again, beside the engine."""
REPLY_LIMIT_S = 60.0
"""A mirror that owes an answer for so long has ended: much less than the time after which a step counts as hung."""
CLOSE_LIMIT_S = 5.0
MAX_BEHIND = 8
"""Steps that the mirror may be behind. Then rank 0 waits for it."""
OTHER_SHAPES = (
    "it declares other step shapes than rank 0, so it cannot run the same plans. Both must run on the same kind of"
    " device, with the same installation of Millrace"
)
READY, SAME, DIFFERENT, ENDED = 1, 2, 3, 4
"""Kinds of replies: the runner is made, with the digest of its shapes; a step's draws are equal; the sentence that
names a difference; the error with which the mirror ends."""


class Mirror:
    """A sink of records. Steps are recorded by one thread."""

    def __init__(
        self, config: Config, *, reply_limit_s: float = REPLY_LIMIT_S, load_limit_s: float = LOAD_LIMIT_S
    ) -> None:
        """Starts the process. `wait_until_ready` before the first step."""
        self._ring = RingWriter()
        self.reply_limit_s = reply_limit_s
        self._load_limit_s = load_limit_s
        fds = self._ring.far_fds
        self.process = subprocess.Popen(
            [sys.executable, "-m", CHILD, *map(str, fds)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C must reach only the front, which then drains.
        )
        self._ring.started()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(as_dict(config)).encode() + b"\n")
        self.process.stdin.close()
        self._changed = threading.Condition()
        self._is_ready = self._is_closing = False
        self._num_sent = self._num_same = self._num_different = 0
        self._ended = self._digest = ""
        """Why it has ended; the digest of the shapes that it declares."""
        threading.Thread(target=self._listen, name="mirror", daemon=True).start()

    @property
    def stats(self) -> MirrorStats:
        return MirrorStats(not self._ended, self._num_same, self._num_different)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_ready(self, digest: str) -> None:
        """`digest`: of the shapes that rank 0 declares. Raises a ConfigError if the mirror does not start, or declares
        others."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._ended, self._load_limit_s)
        if not self._is_ready or self._digest != digest:
            self.close()
            reason = OTHER_SHAPES if self._is_ready else self._ended
            reason = reason or f"it was not ready within {self._load_limit_s:g} s"
            raise ConfigError(f"The mirror (--mirror) did not start: {reason}.", param="mirror")

    def write(self, kind: int, data: bytes) -> None:
        if self._ended:
            return
        try:
            self._ring.write(kind, data, self.reply_limit_s)
        except RingClosed:
            return  # The listening thread says so.
        except TimeoutError:
            self._end(self._silence())
            return
        if kind == RESULT:
            self._num_sent += 1
            self._wait(MAX_BEHIND)

    def settle(self) -> None:
        """Wait until all steps so far are compared."""
        self._wait(0)

    def _wait(self, most_behind: int) -> None:
        """Until it is no further behind. It may take any time as long as it goes on."""

        def is_near() -> bool:
            return bool(self._ended) or self._num_sent - self._num_same <= most_behind

        with self._changed:
            while not is_near():
                before = self._num_same
                self._changed.wait(self.reply_limit_s)
                if self._num_same == before:
                    break
        if not is_near():
            self._end(self._silence())

    def _silence(self) -> str:
        return f"it has not answered for {self.reply_limit_s:g} s"

    def _listen(self) -> None:
        try:
            while True:
                reply = self._ring.read_reply()
                if reply.kind in (DIFFERENT, ENDED):
                    self._num_different += reply.kind == DIFFERENT
                    self._end(reply.body.decode())
                with self._changed:
                    if reply.kind == READY:
                        self._is_ready, self._digest = True, reply.body.decode()
                    self._num_same += reply.kind == SAME
                    self._changed.notify_all()
        except RingClosed:
            if not self._is_closing:
                code = end_of(self.process, "the mirror")
                how = "closed its connection" if code is None else f"ended with exit code {code}"
                self._end(f"its process {how}")

    def _end(self, reason: str) -> None:
        """Say why, once. The engine goes on without it."""
        with self._changed:
            if self._ended or self._is_closing:
                return
            self._ended = reason
            self._changed.notify_all()
        if self._is_ready:
            log.error("the mirror has ended and the engine goes on without it: %s", reason)
        self._ring.close()
        self.process.kill()

    def close(self) -> None:
        """The steps so far are compared first, unless that takes long."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._num_same >= self._num_sent, CLOSE_LIMIT_S)
        self._is_closing = True
        self._ring.close()
        self.process.kill()
        end_of(self.process, "the mirror")
