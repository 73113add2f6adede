"""Runs a program on a pseudo-terminal; tests type into it and read its screen."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x01\x02]")


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._raw = b""
        self._consumed = 0

    @property
    def screen(self) -> str:
        """Everything shown so far, for failure messages."""
        return self._raw.decode(errors="replace")

    @property
    def _seen(self) -> str:
        """The text after the last match of `expect`. Decoded as a whole, since a read may split a character."""
        text = _COLOUR.sub("", self._raw.decode(errors="replace")).replace("\r\n", "\n")
        return text[self._consumed :]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ctrl_c(self) -> None:
        # CPython's readline checks for signals and then waits for a key: a signal in between is noticed only with
        # the next key. No person is that fast; a test is.
        time.sleep(0.3)
        self.type("\x03")

    def expect(self, text: str, timeout_s: float = 60.0) -> str:
        """Read until `text` appears; return the text before it. Colours are removed."""
        deadline = time.monotonic() + timeout_s
        while text not in self._seen:
            if not self._read(deadline):
                raise AssertionError(f"{text!r} did not appear; the screen shows {self._seen[-2000:]!r}")
        before, _, _ = self._seen.partition(text)
        self._consumed += len(before) + len(text)
        return before

    def wait(self, timeout_s: float = 60.0) -> int:
        deadline = time.monotonic() + timeout_s
        while self._read(deadline):
            pass
        return self.process.wait(max(deadline - time.monotonic(), 0.1))

    def _read(self, deadline: float) -> bool:
        """Read the available output; False if there is none until the deadline or the program has ended."""
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._master], [], [], left)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self._raw += data
        return bool(data)


@contextmanager
def on_terminal(arguments: Sequence[str], *, interrupts: signal.Handlers = signal.SIG_DFL) -> Iterator[Terminal]:
    """`python -m millrace ARGUMENTS` on a controlling terminal, so that Ctrl-C sends a signal. `interrupts`: how the
    program finds SIGINT handled when it starts."""

    def set_up() -> None:
        os.login_tty(slave)
        signal.signal(signal.SIGINT, interrupts)

    master, slave = pty.openpty()
    home = tempfile.TemporaryDirectory()  # So that the chat's history is not the user's.
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "XDG_DATA_HOME": home.name},
        preexec_fn=set_up,  # noqa: PLW1509 - nothing else can set a controlling terminal
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(master)
        home.cleanup()
