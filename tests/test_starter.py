"""Programs that tests start in the quick way are what the real start makes: see helpers/starter.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import starter
from helpers.served import command_line, serving
from helpers.tiny_server import tiny_options

pytestmark = pytest.mark.live

VERSION = (sys.executable, "-m", "millrace", "--version")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids of what was started in the quick way, by a starter with today's variables: earlier tests may set some."""
    monkeypatch.setattr(starter, "current_starter", None)
    pids: list[int] = []
    start = starter.Starter.start
    monkeypatch.setattr(starter.Starter, "start", lambda *given: pids.append(start(*given)) or pids[-1])
    return pids


def run(*arguments: str, **options: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "millrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)
    return done.returncode, done.stdout, done.stderr


def test_streams_codes_variables_and_folder_are_those_of_a_real_start(forked: list[int], tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[server]\nhost = '127.0.0.2'\n")
    variables = {**os.environ, "MILLRACE_SERVER__PORT": "8123"}
    for arguments in (["--version"], ["config", "--config", "my.toml"], ["nonsense"], ["show", "no-such-model"]):
        starter.switch(on=True)
        quick = run(*arguments, cwd=tmp_path, env=variables)
        starter.switch(on=False)
        assert quick == run(*arguments, cwd=tmp_path, env=variables)
    assert len(forked) == 4


def test_a_server_and_its_engine_have_names_sessions_and_signals_of_their_own(
    forked: list[int], tmp_path: Path
) -> None:
    with serving(*tiny_options(tmp_path)) as served:
        engine = served.child("millrace.supervise.engine_child")
        assert forked == [served.process.pid]
        assert command_line(forked[0]).startswith(f"{sys.executable}\0-m\0millrace\0serve\0")
        assert len({os.getsid(pid) for pid in (0, *forked, engine)}) == 3
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 0
        assert not os.path.exists(f"/proc/{engine}")


def test_what_a_fork_cannot_do_is_started_from_nothing(forked: list[int]) -> None:
    def version(**options: object) -> None:
        subprocess.run(VERSION, stdout=subprocess.DEVNULL, check=True, timeout=60, **options)

    version(env={**os.environ, "OMP_NUM_THREADS": "2"})
    version(preexec_fn=os.setsid)
    starter.switch(on=False)
    version()
    assert forked == []
