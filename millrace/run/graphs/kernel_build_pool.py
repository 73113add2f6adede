"""The engine's end of `build_server.py`: started before anything heavy is imported, asked when it is known
which kernels are missing, closed when all are there. Whatever goes wrong with it only means that kernels are compiled
later, one by one.
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
from millrace.host.early_context import has_gpu

log = logging.getLogger(__name__)

KERNELS = Path(__file__).parents[2] / "ops" / "triton"

REPLY_LIMIT_S = 90.0
KEPT_MARKS = 64
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
"""Room for all that is ordered before the server has imported what it needs: an order must not wait for it."""


class KernelBuilder:
    def __init__(self, mark: Path) -> None:
        self._mark = mark
        """Exists once every kernel of these settings has been compiled on this machine."""
        self._ordered: set[str] = set()
        self._last_news_at = 0.0
        """When something was ordered or answered."""
        self._open = [0, 0]
        """Kernels of each turn that are ordered and not yet there."""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "millrace.ops.triton.compile.build_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=_PIPE_BYTES,
        )

    def order(self, kernel: str, target: tuple[str, int, int], *, can_wait: bool = False) -> None:
        """Have this one compiled beside the others, unless Triton's cache holds it. Those that can wait come after all
        others, and behind whatever else the machine has to do."""
        if self._server.stdin is None or self._server.stdin.closed or kernel in self._ordered:
            return
        self._ordered.add(kernel)
        turn = int(can_wait)
        try:
            self._server.stdin.write(json.dumps({"target": target, "kernel": kernel, "turn": turn}).encode() + b"\n")
            self._server.stdin.flush()
            self._last_news_at = time.monotonic()
            self._open[turn] += 1
        except OSError:
            self._give_up()

    def is_done(self, wait_s: float = 0.0, *, all_of_it: bool = True) -> bool:
        """Whether what was ordered is there, or never will be, now or after waiting a while: all of it, or what cannot
        wait."""
        until = time.monotonic() + wait_s
        while sum(self._open) if all_of_it else self._open[0]:
            left = until - time.monotonic()
            if not self._hear(max(0.0, left)) and left <= 0:
                return False
        return True

    def _hear(self, wait_s: float) -> bool:
        """Count what has been answered; whether anything was."""
        if self._server.stdout is None:
            return False
        answers = self._server.stdout.fileno()
        if select.select([answers], [], [], wait_s)[0]:
            told = os.read(answers, _READ_BYTES)
            self._last_news_at = time.monotonic()
            for turn in range(len(self._open)):
                self._open[turn] -= told.count(b"%d" % turn)
            if not told:
                self._give_up()
            return True
        if time.monotonic() > self._last_news_at + REPLY_LIMIT_S:
            self._give_up()
        return False

    def _give_up(self) -> None:
        log.warning("Kernels are compiled one by one: the process that compiles them side by side does not answer.")
        self._open = [0, 0]
        self.close()

    def finish(self) -> None:
        """Everything is there: the next start need not look."""
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
        self._server.wait()


def start_builder(config: Config) -> KernelBuilder | None:
    """None where there is no GPU, no Triton, or nothing left to compile."""
    if config.run.device == "cpu" or not has_gpu() or util.find_spec("triton") is None:
        return None
    mark = cache_dir() / "kernels-built" / _fingerprint(config)
    return None if mark.exists() else KernelBuilder(mark)


def _fingerprint(config: Config) -> str:
    """Changes with the settings, the kernels and the compiler."""
    digest = hashlib.sha256(json.dumps(as_dict(config), sort_keys=True, default=str).encode())
    for source in sorted(KERNELS.rglob("*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{sys.version} {metadata.version('triton')}".encode())
    return digest.hexdigest()[:20]
