"""What observing costs: two servers, one that counts, traces and follows objectives and one that does none of it.

Both run at the same time and are measured in turns, the order changing from round to round, so a slow phase of the
machine affects both. Each round gives one ratio; the interval comes from their spread.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from millrace.bench.http.serving import Progress, ServeBench, ServingFigures, await_idle, await_warm, model_name
from millrace.bench.local_server import LocalServer

OFF = ("--no-figures",)
SLOS = "ttft p95 < 500 ms; interactive: itl p99 < 80 ms; standard: e2e p90 < 30 s"
SCRAPE_EVERY_S = 5.0
DASHBOARD_EVERY_S = 1.0
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Two-sided 95% quantiles of Student's t, from one degree of freedom on."""


@dataclass(frozen=True, slots=True)
class Round:
    off: ServingFigures
    on: ServingFigures


@dataclass(frozen=True, slots=True)
class Ratio:
    """`on` over `off`, with a 95% interval."""

    value: float
    low: float
    high: float


def ratio_of(rounds: Sequence[Round], value_of: Callable[[ServingFigures], float]) -> Ratio:
    logs = np.log([value_of(one.on) / value_of(one.off) for one in rounds])
    mean, degrees = float(logs.mean()), len(logs) - 1
    if not degrees:
        return Ratio(math.exp(mean), 0.0, math.inf)
    quantile = T_95[min(degrees, len(T_95)) - 1]
    half = quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def server_cpu_per_token(figures: ServingFigures) -> float:
    """Seconds of CPU of engine and fronts per output token."""
    cores = sum(value for name, value in figures.cores.items() if name != "clients")
    return cores / figures.output_tokens_per_s


@dataclass(frozen=True, slots=True)
class ObserveBench:
    measured: ServeBench
    """Its `server_options` are those of both servers; it has one number of streams."""
    rounds: int
    folder: Path
    """For the audit log."""

    def run(self, progress: Progress) -> Iterator[Round]:
        with ExitStack() as cleanup:
            receiver = cleanup.enter_context(SpanReceiver())
            on_options = (
                *("--slos", SLOS, "--price-per-hour", "2.5", "--otlp-url", receiver.url),
                *("--audit-log", str(self.folder / "audit.jsonl")),
            )
            off, on = (self._server(cleanup, options, progress) for options in (OFF, on_options))
            cleanup.enter_context(Visitors(on.url))
            names = {server: model_name(server) for server in (off, on)}
            for server in (off, on):
                progress("an unmeasured round: the first one is slower")
                self.measured.measure(server, names[server], self.measured.streams[0])
                await_idle(server)
            for number in range(self.rounds):
                order = (off, on) if number % 2 == 0 else (on, off)
                found = {}
                for server in order:
                    progress(f"round {number + 1} of {self.rounds}: {'on' if server is on else 'off'}")
                    found[server] = self.measured.measure(server, names[server], self.measured.streams[0])
                    await_idle(server)
                yield Round(found[off], found[on])

    def _server(self, cleanup: ExitStack, options: tuple[str, ...], progress: Progress) -> LocalServer:
        progress("starting the servers")
        server = cleanup.enter_context(LocalServer((*self.measured.server_options, *options)))
        asyncio.run(server.wait_ready())
        await_warm(server)
        return server


class SpanReceiver:
    """Takes spans over OTLP/HTTP and forgets them. A context manager."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> SpanReceiver:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Visitors:
    """A Prometheus and an open dashboard, as far as the server can tell. A context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._visit, daemon=True)

    def __enter__(self) -> Visitors:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def _visit(self) -> None:
        scrape_due = 0.0
        while not self._stop.wait(DASHBOARD_EVERY_S):
            self._get("/v1/stats?window=300&step=5")
            if time.monotonic() >= scrape_due:
                scrape_due = time.monotonic() + SCRAPE_EVERY_S
                self._get("/metrics")

    def _get(self, path: str) -> None:
        with suppress(OSError), urllib.request.urlopen(self._url + path, timeout=5.0) as answer:
            answer.read()
