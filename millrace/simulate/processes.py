"""Groups of replicas in processes of their own. The fleet asks all of them to reach the next arrival, and waits."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from millrace.errors import MillraceError
from millrace.simulate.group import Ended, Left, ReplicaGroup, ReplicaReport
from millrace.simulate.profile import Profile
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import SimulationSettings

GARBAGE_THRESHOLDS = (100_000, 50, 50)
"""Requests and blocks have no reference cycles to look for."""
END_LIMIT_S = 10.0
"""For a process to end once it has reported."""
PROCESS_ENDED = (
    "A process of the simulation ended, probably for lack of memory. Simulate fewer requests, or use --processes 1."
)


class GroupProcess:
    """The methods of a ReplicaGroup. Those without a result do not wait."""

    def __init__(self, profile: Profile, settings: SimulationSettings, seed: int, indices: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        arguments = (theirs, profile, settings, seed, list(indices))
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask_until(self, at_s: float) -> None:
        """Start `run_until`; `take_ended` waits for its result."""
        self._send("run_until", at_s)

    def take_ended(self) -> Ended:
        ended: Ended = self._result()
        return ended

    def submit(self, index: int, number: int, request: SimulatedRequest, at_s: float) -> None:
        self._send("submit", index, number, request, at_s)

    def kill(self, index: int, back_at: float) -> Left:
        self._send("kill", index, back_at)
        left: Left = self._result()
        return left

    def reports(self) -> list[ReplicaReport]:
        """The last call."""
        self._send("reports")
        found: list[ReplicaReport] = self._result()
        self.close()
        return found

    def close(self) -> None:
        self._end.close()
        self.process.join(END_LIMIT_S)
        if self.process.is_alive():
            self.process.kill()

    def _send(self, *call: object) -> None:
        try:
            self._end.send(call)
        except OSError as error:
            raise MillraceError(PROCESS_ENDED) from error

    def _result(self) -> Any:
        try:
            result = self._end.recv()
        except (EOFError, OSError) as error:
            raise MillraceError(PROCESS_ENDED) from error
        if isinstance(result, Exception):
            raise result
        return result


def _serve(end: Connection, profile: Profile, settings: SimulationSettings, seed: int, indices: list[int]) -> None:
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    group = ReplicaGroup(profile, settings, seed, indices)
    while True:
        try:
            name, *arguments = end.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            result = getattr(group, name)(*arguments)
        except Exception as error:  # told to the fleet, which raises it
            end.send(error)
            return
        if name != "submit":
            end.send(result)
