"""What the front end costs: real fronts, real channel, real tokenizer, and a null engine in place of the device.

Processes: the null engine, one front or several on one port, and clients that hold the streams open. The figures are
tokens that reached the clients per second, and each front's own processor time per token.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any

from millrace.bench.figures import percentile
from millrace.bench.local_server import cpu_seconds, free_port
from millrace.bench.null_engine import serve_null_engine
from millrace.bench.stream_clients import Tally, run_clients
from millrace.bench.target import BenchError

MODEL = "null"
WARM_UP_S = 1.0
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class FrontCost:
    fronts: int
    streams: int
    tokens_per_s: float
    us_per_token: float
    """Processor time of all fronts together over the tokens that they delivered."""
    requests_per_s: float
    frames_per_token: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    errors: int


@dataclass(frozen=True, slots=True)
class FrontBench:
    source: str
    """The model whose tokenizer and chat template are used."""
    fronts: int
    streams: int
    tokens: int = 128
    seconds: float = 5.0
    step_ms: float = 2.0
    clients: int = 1

    def run(self) -> FrontCost:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        with ExitStack() as cleanup:
            directory = cleanup.enter_context(tempfile.TemporaryDirectory())
            num_tokens = context.Value("q", 0)
            self._start(context, cleanup, serve_null_engine, directory, self.fronts, self._vocab_size(),
                        self.step_ms / 1e3, num_tokens)  # fmt: skip
            fronts = [
                self._start(context, cleanup, serve_one_front, self.source, directory, index, self.fronts, port)
                for index in range(self.fronts)
            ]
            for _ in fronts:
                _await_port(port)
            time.sleep(1.0 if self.fronts > 1 else 0.2)  # The port answers as soon as the first front listens.
            return self._measure(context, cleanup, port, [front.pid or 0 for front in fronts], num_tokens)

    def _vocab_size(self) -> int:
        from millrace.sources.resolve import resolve_model
        from millrace.text.tokenizer import load_tokenizer

        return load_tokenizer(resolve_model(self.source)).vocab_size

    def _start(
        self, context: SpawnContext, cleanup: ExitStack, target: Callable[..., None], *args: Any
    ) -> SpawnProcess:
        process = context.Process(target=target, args=args, daemon=True)
        process.start()
        cleanup.callback(_end, process)
        return process

    def _measure(
        self, context: SpawnContext, cleanup: ExitStack, port: int, pids: list[int], num_tokens: Any
    ) -> FrontCost:
        go, stop = context.Event(), context.Event()
        pipes = []
        for number in range(self.clients):
            ours, theirs = context.Pipe(duplex=False)
            opened: Event = context.Event()
            numbers = range(number, self.streams, self.clients)
            self._start(context, cleanup, run_clients, port, MODEL, numbers, self.tokens, go, stop, opened, theirs)
            pipes.append(ours)
            opened.wait(START_LIMIT_S)
        time.sleep(0.5 + self.streams / 4000)
        go.set()
        time.sleep(WARM_UP_S)
        began, used, made = time.monotonic(), sum(map(cpu_seconds, pids)), num_tokens.value
        time.sleep(self.seconds)
        wall_s = time.monotonic() - began
        used, made = sum(map(cpu_seconds, pids)) - used, num_tokens.value - made
        stop.set()
        tallies = [_received(pipe) for pipe in pipes]
        return self._cost(tallies, made, used, wall_s)

    def _cost(self, tallies: list[Tally], made: int, used: float, wall_s: float) -> FrontCost:
        requests = sum(tally.requests for tally in tallies)
        firsts = sorted(1e3 * first for tally in tallies for first in tally.first_s)
        frames = sum(tally.frames for tally in tallies)
        if not made or not requests:
            raise BenchError("No stream ended within the measurement; give it more --seconds or fewer --tokens.")
        return FrontCost(
            fronts=self.fronts,
            streams=self.streams,
            tokens_per_s=made / wall_s,
            us_per_token=1e6 * used / made,
            requests_per_s=made / self.tokens / wall_s,
            frames_per_token=frames / (requests * self.tokens),
            ttft_p50_ms=percentile(firsts, 50),
            ttft_p99_ms=percentile(firsts, 99),
            errors=sum(tally.errors for tally in tallies),
        )


def serve_one_front(source: str, directory: str, index: int, num_fronts: int, port: int) -> None:
    from millrace.config import Config, replace
    from millrace.link.channel import ZmqFrontChannel
    from millrace.link.client import EngineClient
    from millrace.serve.app import run_front
    from millrace.sources.resolve import resolve_model

    config = replace(
        Config(), model__source=source, model__served_name=MODEL, server__port=port, server__fronts=num_fronts
    )

    async def connect() -> EngineClient:
        client = EngineClient(ZmqFrontChannel(directory, index), front_index=index)
        await client.wait_ready(START_LIMIT_S)
        return client

    run_front(config, connect, resolve_model(source), reuse_port=True, directory=directory)


def _received(pipe: Connection) -> Tally:
    try:
        if not pipe.poll(ANSWER_LIMIT_S):
            raise EOFError
        tally: Tally = pipe.recv()
    except EOFError:
        raise BenchError("A process of clients did not report; its output says why.") from None
    return tally


def _await_port(port: int) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise BenchError(f"No front was listening after {START_LIMIT_S:g} s.")


def _end(process: SpawnProcess) -> None:
    process.terminate()
    process.join(3.0)
    if process.is_alive():
        process.kill()
        process.join()
