"""A fleet of fake replicas: started, killed, stopped, restarted one after the other, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_replica
from helpers.ports import free_port
from helpers.served import wait_until

from millrace.cli import main

pytestmark = pytest.mark.live

CODE = """
import asyncio, sys
from pathlib import Path
from millrace.fleet.run import FleetRun
from millrace.fleet.settings import read_fleet_file
fleet = FleetRun(read_fleet_file(Path(sys.argv[1])), program=[sys.executable, sys.argv[2]])
asyncio.run(fleet.run(lambda: print("ready", flush=True)))
"""


class Fleet:
    def __init__(self, directory: Path, extra: str = "") -> None:
        self.ports = [free_port() for _ in range(3)]
        self.file, self.state = directory / "fleet.toml", directory / ".millrace-fleet"
        tables = [f'[[serve]]\nname = "r{n}"\nmodel = "m"\nport = {self.ports[n]}\n' for n in (0, 1)]
        tables.append(f"[gateway]\nport = {self.ports[2]}\n")
        tables.append(
            "[fleet]\nback_off_s = 0.05\nmax_back_off_s = 0.2\nsilent_s = 2.0\nleave_s = 0.2\nstop_s = 20.0\n"
        )
        self.file.write_text("\n".join(tables) + extra)

    def members(self) -> dict[str, dict[str, Any]]:
        try:
            return {one["name"]: one for one in json.loads((self.state / "state.json").read_bytes())["members"]}
        except FileNotFoundError:
            return {}

    def are_ready(self) -> bool:
        found = self.members()
        return len(found) == 3 and all(one["state"] == "ready" for one in found.values())

    def listed(self) -> list[str]:
        return [one["name"] for one in tomllib.loads((self.state / "replicas.toml").read_text()).get("replicas", [])]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "events.jsonl").read_text().splitlines()]


@contextmanager
def running(fleet: Fleet) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", CODE, str(fleet.file), fake_replica.__file__]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        wait_until(fleet.are_ready, "all members are ready")
        yield process
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def has_restarted(fleet: Fleet, name: str, before: int) -> bool:
    one = fleet.members()[name]
    return one["state"] == "ready" and one["pid"] not in (0, before)


def test_a_fleet_lives_through_kills_and_a_restart_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(tmp_path)
    with running(fleet) as process:
        assert fleet.listed() == ["r0", "r1"]
        # A member that is killed is restarted, and is not listed meanwhile.
        before = fleet.members()["r0"]["pid"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: has_restarted(fleet, "r0", before), "r0 is restarted")
        assert fleet.members()["r0"]["reason"] == "signal 9 ended it"
        # One that does not answer is killed.
        silent = fleet.members()["r1"]["pid"]
        os.kill(silent, signal.SIGSTOP)
        wait_until(lambda: has_restarted(fleet, "r1", silent), "r1 is restarted")
        assert "answered nothing for 2 s" in fleet.members()["r1"]["reason"]
        capsys.readouterr()
        assert main(["status", str(fleet.file)]) == 0
        said = capsys.readouterr().out
        assert "r0" in said
        assert "r1 was last restarted because it answered nothing for 2 s." in said
        # A rolling restart takes the file's present options, one replica at a time.
        pids = {name: one["pid"] for name, one in fleet.members().items()}
        fleet.file.write_text(fleet.file.read_text().replace('model = "m"', 'model = "m2"'))
        assert main(["restart", str(fleet.file)]) == 0
        assert all(fleet.members()[name]["pid"] != pids[name] for name in ("r0", "r1"))
        assert fleet.members()["gateway"]["pid"] == pids["gateway"]
        assert {one["restarts"] for one in fleet.members().values()} == {0, 1}, "a planned restart is no failure"
        order = [(one["member"], one["event"]) for one in fleet.events()]
        rolled = order[order.index(("fleet", "rolling restart")) :]
        assert [one for one in rolled if one[1] in ("draining", "ready")] == [
            *(("r0", "draining"), ("r0", "ready")),
            *(("r1", "draining"), ("r1", "ready")),
        ]
        assert main(["status", str(fleet.file), "--json"]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        assert "m2" in shown[0]["load"]["args"]
        # Two cannot run the same fleet.
        assert main(["up", str(fleet.file)]) == 1
        assert "running already" in capsys.readouterr().err
        assert main(["down", str(fleet.file)]) == 0
        assert process.wait(60) == 0
    assert main(["status", str(fleet.file)]) == 1
    assert "No fleet runs" in capsys.readouterr().err
    ended = [one["member"] for one in fleet.events() if one["event"] == "draining"][-3:]
    assert ended[0] == "gateway", "no client meets a replica that is gone"
    capsys.readouterr()
    assert main(["postmortem", str(fleet.state)]) == 0
    away = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("- r0 for", "- r1 for"))]
    assert [line.rpartition(": ")[2] for line in away] == [
        *("signal 9 ended it.", "it answered nothing for 2 s."),
        *["it was restarted on purpose."] * 2,
    ]


def test_a_replica_that_cannot_start_waits_longer_each_time_and_harms_no_other(tmp_path: Path) -> None:
    port = free_port()
    fleet = Fleet(tmp_path, f'[[serve]]\nname = "bad"\nmodel = "broken"\nport = {port}\n')
    command = [sys.executable, "-c", CODE, str(fleet.file), fake_replica.__file__]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: fleet.members().get("bad", {}).get("restarts", 0) >= 4, "it is tried again")
            wait_until(lambda: fleet.members()["r0"]["state"] == "ready", "another is ready")
            assert fleet.members()["bad"]["reason"] == "it ended with code 3"
            waits = [one["wait_s"] for one in fleet.events() if one["member"] == "bad" and one["event"] == "waiting"]
            assert waits[:4] == [0.05, 0.1, 0.2, 0.2]
        finally:
            process.terminate()


def test_up_says_what_it_would_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(tmp_path)
    assert main(["up", str(fleet.file), "--check"]) == 0
    said = capsys.readouterr().out
    assert f"serve m --host 127.0.0.1 --port {fleet.ports[0]}" in said
    assert "gateway --config" in said
    assert not fleet.state.exists()
