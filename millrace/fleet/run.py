"""Runs a fleet until it is told to end: SIGTERM or SIGINT ends it, SIGHUP restarts its replicas one after the other."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from millrace.errors import ConfigError
from millrace.fleet.member import Member
from millrace.fleet.settings import FleetFile, Replica, read_fleet_file
from millrace.fleet.state_files import FleetState, StateFiles

log = logging.getLogger("millrace.fleet")

GATEWAY = "gateway"
HEADER_LIMIT = ("--header-limit-kb", "256")
"""Room for the token ids of a stream that moves to another replica, about 48,000."""

MILLRACE = (sys.executable, "-m", "millrace")


def replica_command(replica: Replica, program: Sequence[str] = MILLRACE) -> list[str]:
    variables = [f"{name}={value}" for name, value in replica.environment.items()]
    limit = () if HEADER_LIMIT[0] in replica.args else HEADER_LIMIT
    address = ("--host", replica.host, "--port", str(replica.port))
    start = ["env", *variables] if variables else []
    return [*start, *program, "serve", replica.model, *address, *limit, *replica.args]


class FleetRun:
    def __init__(self, file: FleetFile, program: Sequence[str] = MILLRACE) -> None:
        """`program`: what `serve` and `gateway` are commands of."""
        self._file, self._program = file, program
        self.files = StateFiles(file.directory)
        self._started = time.time()
        self._is_rolling = False
        self._replicas = {
            one.name: self._member(one.name, "replica", one.url, replica_command(one, program)) for one in file.replicas
        }
        self._gateway: Member | None = None
        if file.gateway is not None:
            host, port = file.gateway_address
            command = [*program, "gateway", "--config", str(self.files.replicas)]
            self._gateway = self._member(GATEWAY, GATEWAY, f"http://{host}:{port}", command)

    def _member(self, name: str, kind: str, url: str, command: list[str]) -> Member:
        log_file = self.files.directory / f"{name}.log"
        return Member(name, kind, url, command, log_file, self._file.fleet, self.files.note, self._on_change)

    @property
    def members(self) -> list[Member]:
        return [*self._replicas.values(), *([self._gateway] if self._gateway is not None else [])]

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        self.files.take()
        try:
            self.files.note("fleet", "up", file=str(self._file.path), members=[one.state.name for one in self.members])
            self._on_change()
            await self._run(on_ready)
            self.files.note("fleet", "down")
            self.files.state.unlink(missing_ok=True)
        finally:
            self.files.give_up()

    async def _run(self, on_ready: Callable[[], None]) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        tasks = [asyncio.create_task(member.keep()) for member in self.members]
        announcing = asyncio.create_task(self._announce(on_ready))
        rolling: list[asyncio.Task[None]] = []
        loop.add_signal_handler(signal.SIGHUP, lambda: rolling.append(asyncio.create_task(self.roll())))
        try:
            await stop.wait()
        finally:
            for task in (announcing, *rolling):
                task.cancel()
            if self._gateway is not None:  # First, so that no client meets a replica that is gone.
                await self._gateway.end()
            await asyncio.gather(*(member.end() for member in self.members))
            await asyncio.gather(*tasks)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await asyncio.gather(*(member.wait_ready() for member in self.members))
        on_ready()

    async def roll(self) -> None:
        """Restart the replicas one after the other, with the file's present options. The next one waits until the one
        before is ready, so a model with two replicas stays available."""
        if self._is_rolling:
            return
        self._is_rolling = True
        try:
            changed = self._changed_commands()
            self.files.note("fleet", "rolling restart")
            for name, member in self._replicas.items():
                others = [one for one in self._replicas.values() if one is not member]
                await asyncio.gather(*(one.wait_ready() for one in others))
                await member.restart(changed.get(name, member.command))
            self.files.note("fleet", "rolled")
        finally:
            self._is_rolling = False
            self._on_change()

    def _changed_commands(self) -> dict[str, list[str]]:
        """By name, the commands of the file as it is now. Replicas cannot be added or removed while the fleet runs."""
        try:
            file = read_fleet_file(self._file.path)
        except ConfigError as error:
            log.error("%s The replicas restart with the options they had.", error.message)
            self.files.note("fleet", "the file is wrong", why=error.message)
            return {}
        urls = {name: member.state.url for name, member in self._replicas.items()}
        return {one.name: replica_command(one, self._program) for one in file.replicas if urls.get(one.name) == one.url}

    def _on_change(self) -> None:
        """Tell those who read: the gateway which replicas take requests, and `millrace status`."""
        states = [member.state for member in self.members]
        self.files.write(FleetState(os.getpid(), str(self._file.path), self._started, states, self._is_rolling))
        if self._file.gateway is not None:
            own = [_listed(one) for one in states if one.kind == "replica" and one.state in ("ready", "starting")]
            self.files.write_replicas(self._file.gateway, [*own, *self._file.elsewhere])


def _listed(state: Any) -> dict[str, str]:
    return {"name": state.name, "url": state.url}
