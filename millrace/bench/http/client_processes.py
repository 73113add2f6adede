"""Client processes that hold streams, seen from their parent: started, connected, begun together, results merged."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess

from millrace.bench.errors import BenchError
from millrace.bench.http.stream_clients import BEGIN, FROM, TO, UNTIL, Tally, merge, run_clients

START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 20.0
SETTLE_S = 0.2
"""Pause between the last connection and the first request."""


class ClientProcesses:
    """`count` processes that together hold `streams` streams; `cleanup` ends them. `key`: sent as the API key."""

    def __init__(
        self,
        context: SpawnContext,
        cleanup: ExitStack,
        *,
        port: int,
        model: str,
        streams: int,
        num_tokens: int,
        count: int,
        key: str = "",
    ) -> None:
        self._schedule = context.Array("d", 4, lock=False)
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for number in range(min(count, streams)):
            ours, theirs = context.Pipe(duplex=False)
            numbers = range(number, streams, count)
            process = context.Process(
                target=run_clients, args=(port, model, numbers, num_tokens, self._schedule, theirs, key), daemon=True
            )
            process.start()
            theirs.close()
            cleanup.callback(end_process, process)
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            _received(pipe, START_LIMIT_S)
        time.sleep(SETTLE_S)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def begin(self, *, warm_up_s: float, seconds: float, further_s: float = 0.0) -> tuple[float, float]:
        """Send all first requests now. Returns begin and end of the measured interval on `time.monotonic`."""
        now = time.monotonic()
        self._schedule[FROM] = now + warm_up_s
        self._schedule[TO] = now + warm_up_s + seconds
        self._schedule[UNTIL] = self._schedule[TO] + further_s
        self._schedule[BEGIN] = now
        return self._schedule[FROM], self._schedule[TO]

    def results(self) -> Tally:
        """Wait for the end and merge the tallies of all processes."""
        limit_s = max(0.0, self._schedule[UNTIL] - time.monotonic()) + ANSWER_LIMIT_S
        return merge([_received(pipe, limit_s) for pipe in self._pipes])


def _received(pipe: Connection, limit_s: float) -> Tally:
    try:
        if not pipe.poll(limit_s):
            raise EOFError
        tally: Tally = pipe.recv()
    except EOFError:
        raise BenchError("A client process did not report; see its output.") from None
    return tally


def end_process(process: SpawnProcess) -> None:
    process.terminate()
    process.join(3.0)
    if process.is_alive():
        process.kill()
        process.join()
