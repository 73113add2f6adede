"""One process of a fleet: started, watched, restarted with back-off, and ended gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from millrace.fleet.back_off import BackOff
from millrace.fleet.settings import FleetSettings
from millrace.fleet.state_files import MemberState

CHECK_EVERY_S = 0.5
ASK_TIMEOUT_S = 5.0
READY_PATH = "/ready"

Note = Callable[..., None]


class Member:
    def __init__(
        self,
        name: str,
        kind: str,
        url: str,
        command: Sequence[str],
        log: Path,
        settings: FleetSettings,
        note: Note,
        on_change: Callable[[], None],
    ) -> None:
        """`note(member, event, **facts)` keeps an event; `on_change` is called after each change of the state."""
        self.state = MemberState(name, kind, url, "waiting", since=time.time())
        self.command = list(command)
        self._log, self._settings, self._note, self._on_change = log, settings, note, on_change
        self._back_off = BackOff(settings)
        self._process: asyncio.subprocess.Process | None = None
        self._is_wanted = True
        self._is_planned = False
        """True while it ends because it is to start anew."""
        self._changed = asyncio.Condition()

    # ── what others ask ───────────────────────────────────────────────────────────────────────────────────────────────
    async def keep(self) -> None:
        """Run the process, again and again, until `end`."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)) as session:
            while self._is_wanted:
                began = time.monotonic()
                why = await self._run_once(session)
                if not self._is_wanted:
                    break
                if self._is_planned:
                    self._is_planned = False
                    continue
                wait_s = self._back_off.after(time.monotonic() - began)
                self.state.restarts += 1
                self.state.reason = why
                self._change("waiting", why=why, wait_s=round(wait_s, 3))
                await asyncio.sleep(wait_s)
        self._change("stopped")

    async def end(self) -> None:
        """End the process for good: SIGTERM, then SIGKILL if it takes too long."""
        self._is_wanted = False
        await self._stop()

    async def restart(self, command: Sequence[str]) -> None:
        """End the process gracefully and wait until its successor, with this command, is ready."""
        self.command = list(command)
        self._back_off = BackOff(self._settings)
        before, self._is_planned = self.state.pid, self._process is not None
        if self._is_planned:
            self._change("draining")
            await asyncio.sleep(self._settings.leave_s)
        if self.state.pid == before:
            await self._stop()
        async with self._changed:
            await self._changed.wait_for(lambda: self.state.state == "ready" and self.state.pid != before)

    async def wait_ready(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.state.state == "ready")

    # ── one process ───────────────────────────────────────────────────────────────────────────────────────────────────
    async def _run_once(self, session: aiohttp.ClientSession) -> str:
        """Start the process and watch it until it has ended. Returns why."""
        with self._log.open("ab") as out:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            except OSError as error:
                return f"it could not be started: {error.strerror}"
        self._process, self.state.pid = process, process.pid
        if not self._is_wanted:  # It was told to end while the process was being made.
            process.terminate()
        self._change("starting", pid=process.pid)
        watching = asyncio.create_task(self._watch(session, process))
        try:
            code = await process.wait()
        finally:
            watching.cancel()
            killed = await asyncio.gather(watching, return_exceptions=True)
        self._process, self.state.pid = None, 0
        self._note(self.state.name, "ended", code=code)
        why = killed[0] if isinstance(killed[0], str) else ""
        return why or (f"signal {-code} ended it" if code < 0 else f"it ended with code {code}")

    async def _watch(self, session: aiohttp.ClientSession, process: asyncio.subprocess.Process) -> str:
        """Kill the process if it does not become ready, or is silent for too long. Returns why."""
        heard = began = time.monotonic()
        was_ready = False
        while True:
            answer = await _ask(session, self.state.url + READY_PATH)
            now = time.monotonic()
            heard = now if answer else heard
            if answer == 200 and self.state.state == "starting":
                was_ready = True
                self._change("ready", after_s=round(now - began, 3))
            if not was_ready and now - began > self._settings.start_s:
                why = f"it was not ready after {self._settings.start_s:g} s"
            elif was_ready and now - heard > self._settings.silent_s:
                why = f"it answered nothing for {self._settings.silent_s:g} s"
            else:
                await asyncio.sleep(CHECK_EVERY_S)
                continue
            self._note(self.state.name, "killed", why=why)
            _kill(process)
            return why

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if self.state.state != "draining":
            self._change("draining")
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), self._settings.stop_s)
        except TimeoutError:
            self._note(self.state.name, "killed", why=f"it did not end within {self._settings.stop_s:g} s")
            _kill(process)
            await process.wait()

    def _change(self, state: str, **facts: Any) -> None:
        self.state.state, self.state.since = state, time.time()
        self._note(self.state.name, state, **facts)
        self._on_change()
        self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Its children end with it: an engine ends when its parent's pipe closes."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _ask(session: aiohttp.ClientSession, url: str) -> int:
    """The status of an answer, or 0."""
    try:
        async with session.get(url) as answer:
            return answer.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return 0
