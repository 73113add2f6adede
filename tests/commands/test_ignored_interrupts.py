"""SIGINT stops a program that was started with it ignored, as a script does with its background jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.fake_openai import FakeServer, running
from helpers.served import wait_until
from helpers.terminal import on_terminal

pytestmark = pytest.mark.live

IN_BACKGROUND = ("bash", "-c", '"$@" & echo $!; wait $!', "bash", sys.executable, "-m", "millrace")


class Job:
    """A background job of a script. It reads its settings from a pipe, and waits there until they are written."""

    def __init__(self, script: subprocess.Popen[str], settings: Path) -> None:
        assert script.stdout is not None
        self._script = script
        self.pid = int(script.stdout.readline())
        self._settings = settings
        self._pipe = -1
        wait_until(self._is_reading, "the program reads its settings")

    def _is_reading(self) -> bool:
        assert self._script.poll() is None
        try:
            self._pipe = os.open(self._settings, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # Nobody reads.
            return False
        return True

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def exit_code(self, settings: bytes = b"") -> int:
        if settings:
            os.write(self._pipe, settings)
            os.close(self._pipe)
        return self._script.wait(60)


@contextmanager
def background_job(settings: Path, *arguments: str) -> Iterator[Job]:
    os.mkfifo(settings)
    command = [*IN_BACKGROUND, *arguments, "--config", str(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as script:
        job = Job(script, settings)
        try:
            yield job
        finally:
            if script.poll() is None:
                os.kill(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("command", ["chat", "run", "serve"])
def test_a_program_that_runs_until_ctrl_c_ends(command: str, tmp_path: Path) -> None:
    with background_job(tmp_path / "settings.toml", command) as job:
        job.interrupt()
        assert job.exit_code() == 130


def test_another_program_goes_on(tmp_path: Path) -> None:
    with background_job(tmp_path / "settings.toml", "generate", "Hi") as job:
        job.interrupt()
        assert job.exit_code(b"no setting") == 2, "it has read the wrong settings"


def test_ctrl_c_stops_an_answer() -> None:
    with (
        running(FakeServer(token_delay_s=0.05)) as server,
        on_terminal(["chat", "--url", server.url, "--max-tokens", "1000"], interrupts=signal.SIG_IGN) as t,
    ):
        t.expect("you ›")
        t.type("count\r")
        t.expect("w3")
        t.ctrl_c()
        t.expect("(stopped)")
        t.type("/exit\r")
        assert t.wait() == 0, t.screen
