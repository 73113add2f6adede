"""The engine's side of `build_server.py`, the process that compiles Triton kernels in parallel.

It is started before the heavy imports, receives a build request for each missing kernel, and is closed when all are
compiled. If it fails, kernels are compiled one by one at their first launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from importlib import metadata, util
from pathlib import Path

from millrace.config import Config, as_dict, cache_dir
from millrace.host.children import end_of
from millrace.host.early_context import has_gpu

log = logging.getLogger(__name__)

OPS = Path(__file__).parents[2] / "ops"

REPLY_LIMIT_S = 90.0
KEPT_MARKS = 64
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
"""Pipe size: build requests sent before the server has finished its imports must not block."""


class KernelBuildPool:
    def __init__(self, mark: Path) -> None:
        self._mark = mark
        """File that exists once every kernel for these settings has been compiled on this machine."""
        self._requested: set[str] = set()
        self._last_active_s = 0.0
        """Time of the last request or reply, on the monotonic clock."""
        self._open = [0, 0]
        """Open build requests by turn: 0 = needed for the first request, 1 = can wait."""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "millrace.ops.triton.compile.build_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=_PIPE_BYTES,
        )

    def request(self, kernel: str, target: tuple[str, int, int], *, can_wait: bool = False) -> None:
        """Request a kernel build, unless it was requested before. Kernels that can wait are built after all others, at
        low process priority."""
        if self._server.stdin is None or self._server.stdin.closed or kernel in self._requested:
            return
        self._requested.add(kernel)
        turn = int(can_wait)
        try:
            self._server.stdin.write(json.dumps({"target": target, "kernel": kernel, "turn": turn}).encode() + b"\n")
            self._server.stdin.flush()
            self._last_active_s = time.monotonic()
            self._open[turn] += 1
        except OSError:
            self._give_up()

    def is_done(self, wait_s: float = 0.0, *, urgent_only: bool = False) -> bool:
        """True if no build request is open, waiting up to `wait_s`. With `urgent_only`, requests that can wait do not
        count."""
        until = time.monotonic() + wait_s
        while self._open[0] if urgent_only else sum(self._open):
            left = until - time.monotonic()
            if not self._read_replies(max(0.0, left)) and left <= 0:
                return False
        return True

    def _read_replies(self, wait_s: float) -> bool:
        """Count the replies that have arrived; False if there were none."""
        if self._server.stdout is None:
            return False
        pipe = self._server.stdout.fileno()
        if select.select([pipe], [], [], wait_s)[0]:
            replies = os.read(pipe, _READ_BYTES)
            self._last_active_s = time.monotonic()
            for turn in range(len(self._open)):
                self._open[turn] -= replies.count(b"%d" % turn)
            if not replies:
                self._give_up()
            return True
        if time.monotonic() > self._last_active_s + REPLY_LIMIT_S:
            self._give_up()
        return False

    def _give_up(self) -> None:
        log.warning("Kernels are compiled one by one: the process that compiles them in parallel does not reply.")
        self._open = [0, 0]
        self.close()

    def finish(self) -> None:
        """All kernels are compiled: write the mark, so that the next start skips the build."""
        with contextlib.suppress(OSError):
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
            marks = sorted(self._mark.parent.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in marks[:-KEPT_MARKS]:
                old.unlink()
        self.close()

    def close(self) -> None:
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._server.kill()
        end_of(self._server, "the kernel builds")


def start_build_pool(config: Config) -> KernelBuildPool | None:
    """Start the build server; None without a GPU or Triton, or if all kernels are compiled already."""
    if config.run.tensor_parallel > 1:
        return None  # Ranks compile at the first launch: a dry run on one of them would wait for the others.
    if config.run.device == "cpu" or not has_gpu() or util.find_spec("triton") is None:
        return None
    mark = cache_dir() / "kernels-built" / _fingerprint(config)
    return None if mark.exists() else KernelBuildPool(mark)


def _fingerprint(config: Config) -> str:
    """Hash of the settings, the kernel sources, their measured tables and the compiler version."""
    digest = hashlib.sha256(json.dumps(as_dict(config), sort_keys=True, default=str).encode())
    for source in sorted((*OPS.glob("triton/**/*.py"), *OPS.glob("tuning/**/*.json"))):
        digest.update(source.read_bytes())
    digest.update(f"{sys.version} {metadata.version('triton')}".encode())
    return digest.hexdigest()[:20]
