"""Cost of the fronts: real fronts, channel and tokenizer over a null engine.

Processes: the null engine, one or more fronts on one port, and clients that hold streams open. The figures are tokens
per second that reached the clients, and CPU time of the fronts per token.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.http.client_processes import START_LIMIT_S, ClientProcesses, end_process
from millrace.bench.http.stream_clients import Tally
from millrace.bench.local_server import cpu_seconds, free_port
from millrace.bench.micro.null_engine import serve_null_engine

MODEL = "null"
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class FrontCost:
    fronts: int
    streams: int
    tokens_per_s: float
    us_per_token: float
    """CPU time of all fronts together, per delivered token."""
    requests_per_s: float
    frames_per_token: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    errors: int

    def figures(self) -> list[Figure]:
        name = f"{self.fronts} front{'s' if self.fronts > 1 else ''}, {self.streams:,} streams"
        note = (
            f"{self.requests_per_s:.0f} requests/s, {self.frames_per_token:.2f} frames/token,"
            f" TTFT p50 {self.ttft_p50_ms:.0f} p99 {self.ttft_p99_ms:.0f} ms, {self.errors} errors"
        )
        return [
            Figure(name, "output", self.tokens_per_s, "tok/s", note=note),
            Figure(name, "per front", self.tokens_per_s / self.fronts, "tok/s"),
            Figure(name, "front CPU", self.us_per_token, "µs/token"),
        ]


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
            time.sleep(1.0 if self.fronts > 1 else 0.2)  # The port is open as soon as the first front listens.
            return self._measure(context, cleanup, port, [front.pid or 0 for front in fronts], num_tokens)

    def _vocab_size(self) -> int:
        from millrace.sources.resolve import resolve_model
        from millrace.text.tokenizers.load import load_tokenizer

        return load_tokenizer(resolve_model(self.source)).vocab_size

    def _start(
        self, context: SpawnContext, cleanup: ExitStack, target: Callable[..., None], *args: Any
    ) -> SpawnProcess:
        process = context.Process(target=target, args=args, daemon=True)
        process.start()
        cleanup.callback(end_process, process)
        return process

    def _measure(
        self, context: SpawnContext, cleanup: ExitStack, port: int, pids: list[int], num_tokens: Any
    ) -> FrontCost:
        clients = ClientProcesses(
            context,
            cleanup,
            port=port,
            model=MODEL,
            streams=self.streams,
            num_tokens=self.tokens,
            count=self.clients,
        )
        measured_from, measured_to = clients.begin(warm_up_s=WARM_UP_S, seconds=self.seconds)
        time.sleep(max(0.0, measured_from - time.monotonic()))
        began, used, made = time.monotonic(), sum(map(cpu_seconds, pids)), num_tokens.value
        time.sleep(max(0.0, measured_to - time.monotonic()))
        wall_s = time.monotonic() - began
        used, made = sum(map(cpu_seconds, pids)) - used, num_tokens.value - made
        return self._cost(clients.results(), made, used, wall_s)

    def _cost(self, tally: Tally, made: int, used: float, wall_s: float) -> FrontCost:
        ttft_ms = [1e3 * first for first in (*tally.burst_s, *tally.first_s)]
        if not made or not tally.whole:
            raise BenchError("No stream ended within the measurement. Use more --seconds or fewer --tokens.")
        return FrontCost(
            fronts=self.fronts,
            streams=self.streams,
            tokens_per_s=made / wall_s,
            us_per_token=1e6 * used / made,
            requests_per_s=made / self.tokens / wall_s,
            frames_per_token=tally.whole_frames / (tally.whole * self.tokens),
            ttft_p50_ms=percentile(ttft_ms, 50),
            ttft_p99_ms=percentile(ttft_ms, 99),
            errors=tally.errors,
        )


def serve_one_front(source: str, directory: str, index: int, num_fronts: int, port: int) -> None:
    from millrace.config import Config, replace
    from millrace.link.client import EngineClient
    from millrace.link.front_end import SocketFrontChannel
    from millrace.model_settings import ModelSettings
    from millrace.serve.app import run_front

    config = replace(
        Config(), model__source=source, model__served_name=MODEL, server__port=port, server__fronts=num_fronts
    )

    async def connect() -> dict[str, EngineClient]:
        client = EngineClient(SocketFrontChannel(directory, index), front_index=index)
        await client.wait_ready(START_LIMIT_S)
        return {MODEL: client}

    run_front((ModelSettings(MODEL, (), config, True),), connect, reuse_port=True, directory=directory)


def _await_port(port: int) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise BenchError(f"No front was listening after {START_LIMIT_S:g} s.")
