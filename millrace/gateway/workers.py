"""Several processes of one gateway on one port: the kernel spreads connections, and a process that dies is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec
import uvloop

from millrace.config import Config
from millrace.errors import ConfigError, MillraceError
from millrace.gateway.app import serve_gateway
from millrace.gateway.settings import GatewaySettings, ReplicaSettings
from millrace.observe.logs import setup_logging
from millrace.serve.app import listening_socket

log = logging.getLogger("millrace.gateway")
MAX_WORKERS = 64
START_LIMIT_S = 120.0
RESTART_S = 1.0
END_GRACE_S = 10.0
"""For a process to end after its drain."""


def serve_with_workers(
    settings: GatewaySettings,
    replicas: Sequence[ReplicaSettings],
    *,
    fleet_file: Path | None,
    on_listening: Callable[[str, int], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then let every process drain."""
    if not 1 <= settings.workers <= MAX_WORKERS:
        raise ConfigError(f"workers is {settings.workers}; it must be from 1 to {MAX_WORKERS}.", param="workers")
    # Bound but not listening: it keeps the port, and gets no connections.
    with listening_socket(settings.host, settings.port, Config(), reuse_port=True) as sock, _shared(settings) as shared:
        host, port = sock.getsockname()[:2]
        shared = msgspec.structs.replace(shared, port=port, reuse_port=True)
        workers = [_Worker(number, shared, replicas, fleet_file) for number in range(settings.workers)]
        try:
            for one in workers:
                one.wait_until_listening()
            on_listening(host, port)
            _watch(workers)
        finally:
            for one in workers:
                one.ask_to_stop()
            for one in workers:
                one.end(settings.drain_s + END_GRACE_S)


def _watch(workers: Sequence[_Worker]) -> None:
    """Replace those that end, until SIGTERM or SIGINT."""
    with _stopping() as stop:
        while not wait([stop], RESTART_S):
            for one in workers:
                one.restart_if_ended()


@contextlib.contextmanager
def _shared(settings: GatewaySettings) -> Iterator[GatewaySettings]:
    """Limits of keys hold over all processes: without a store of the operator's they share one of their own."""
    if settings.limits_store or not (settings.keys_file or settings.router):
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="millrace-gateway-") as directory:
        yield msgspec.structs.replace(settings, limits_store=f"sqlite:{directory}/limits")


@contextlib.contextmanager
def _stopping() -> Iterator[Connection]:
    """Readable once SIGTERM or SIGINT came."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: theirs.send_bytes(b"stop")) for number in numbers]
    try:
        yield ours
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        ours.close()
        theirs.close()


class _Worker:
    def __init__(
        self, number: int, settings: GatewaySettings, replicas: Sequence[ReplicaSettings], fleet_file: Path | None
    ) -> None:
        if number and settings.decision_log:
            settings = msgspec.structs.replace(settings, decision_log=f"{settings.decision_log}.{number}")
        self._number = number
        self._arguments = (settings, tuple(replicas), fleet_file)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_listening(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            if self._end.poll(START_LIMIT_S):
                error: MillraceError | None = self._end.recv()
                if error is None:
                    return
                raise error
        raise MillraceError(f"Process {self._number} of the gateway did not start; its reason is above.")

    def restart_if_ended(self) -> None:
        if self._process.is_alive():
            return
        log.error("Process %d of the gateway ended with %s; it is started again.", self._number, self._process.exitcode)
        self._end.close()
        self._start()

    def ask_to_stop(self) -> None:
        self._end.close()

    def end(self, limit_s: float) -> None:
        self._process.join(limit_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _work(
    end: Connection, settings: GatewaySettings, replicas: Sequence[ReplicaSettings], fleet_file: Path | None
) -> None:
    """One process. It stops when the other end of the connection is closed, as when the first process dies."""
    setup_logging("info", process="gateway")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    async def serve() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(end.fileno(), stop.set)
        await serve_gateway(
            settings, replicas, fleet_file=fleet_file, on_listening=lambda *_: end.send(None), stop=stop
        )

    try:
        uvloop.run(serve())
    except MillraceError as error:
        with contextlib.suppress(OSError):
            end.send(error)
