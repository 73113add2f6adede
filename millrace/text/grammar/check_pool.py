"""Checks grammars in processes of their own, so that one that takes too much time or memory can be stopped."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
import threading
import time

import msgspec

from millrace.params.grammar import Grammar
from millrace.text.grammar.compiler import GrammarError

CHECK_LIMIT_S = 6.0
"""Time for one grammar on a machine that is busy; the process itself limits its CPU time."""
START_LIMIT_S = 30.0
"""Time for the first reply of a process, which imports llguidance."""
END_LIMIT_S = 5.0
"""Time from the end of a process's output to its own."""
_READ_BYTES = 1 << 16


class CheckPool:
    """Called by several threads, each of which has a process while it waits. A process serves until a grammar ends
    it."""

    def __init__(self, limit_s: float = CHECK_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._idle: list[_CheckProcess] = []
        self._is_closed = False

    def __call__(self, grammar: Grammar) -> None:
        """Raise `GrammarError` if no answer can be held to the grammar."""
        try:
            problem = self._check(grammar)
        except _Killed:  # A second time it may be because of the grammar.
            try:
                problem = self._check(grammar)
            except _Killed:
                raise too_complex(grammar) from None
        if problem is not None:
            raise GrammarError(problem)

    def _check(self, grammar: Grammar) -> str | None:
        process = self._take()
        try:
            problem = process.check(grammar, self._limit_s)
        except BaseException:
            process.end()
            raise
        self._give_back(process)
        return problem

    def _take(self) -> _CheckProcess:
        """A process that runs: somebody else, such as the kernel when memory is short, may have ended an idle one."""
        while True:
            with self._lock:
                if not self._idle:
                    break
                process = self._idle.pop()
            if process.is_running:
                return process
            process.end()
        return _CheckProcess()

    def _give_back(self, process: _CheckProcess) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.end()

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for process in idle:
            process.end()


class _Killed(Exception):
    """Somebody else, such as the kernel when memory is short, ended the process during a check."""


def too_complex(grammar: Grammar) -> GrammarError:
    return GrammarError(f"The {grammar.noun} is too complex: its check took too much time or memory; simplify it.")


class _CheckProcess:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millrace.text.grammar.check_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._is_new = True

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def check(self, grammar: Grammar, limit_s: float) -> str | None:
        """What is wrong with the grammar. Raises `GrammarError` if it takes too much, `_Killed` if somebody else ended
        the process; then the process is of no use."""
        if self._is_new:  # Loading does not count: the first reply is to a grammar that takes no time.
            self._send(Grammar("json_object"))
            if not self._reply(START_LIMIT_S):
                raise RuntimeError("The process that checks grammars did not start.")
            self._is_new = False
        self._send(grammar)
        reply = self._reply(limit_s)
        if reply is None:
            raise too_complex(grammar)
        if not reply:  # It ends by SIGKILL neither when it reaches its limits nor when it fails.
            raise _Killed if self._process.wait(END_LIMIT_S) == -signal.SIGKILL else too_complex(grammar)
        return msgspec.json.decode(reply, type=str | None)

    def _send(self, grammar: Grammar) -> None:
        assert self._process.stdin is not None
        # After a process that has ended, no reply comes either.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            self._process.stdin.flush()

    def _reply(self, limit_s: float) -> bytes | None:
        """The next line; None if it does not come in time, empty if the process ends."""
        assert self._process.stdout is not None
        until, reply = time.monotonic() + limit_s, b""
        while not reply.endswith(b"\n"):
            remaining = until - time.monotonic()
            if remaining <= 0 or not select.select([self._process.stdout], [], [], remaining)[0]:
                return None
            part = self._process.stdout.read1(_READ_BYTES)  # type: ignore[attr-defined]
            if not part:
                return b""
            reply += part
        return reply

    def end(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()
