"""A whole `millrace serve` under many open streams from client processes on the same machine.

The server runs with its defaults. What the clients saw is reported with the CPU time of each server process and the
engine's counters over the same interval, to show where the limit is.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from millrace.bench.errors import BenchError
from millrace.bench.figures import percentile
from millrace.bench.http.client_processes import ClientProcesses
from millrace.bench.http.stack_samples import HotFunctions, sample_processes
from millrace.bench.http.stream_clients import Tally
from millrace.bench.local_server import LocalServer, command_line, descendants, own_cpu_seconds
from millrace.bench.metrics_page import SCRAPE_TIMEOUT_S, scrape

WARM_LIMIT_S = 90.0
IDLE_LIMIT_S = 30.0
PROFILE_S = 3.0
ENGINE = "millrace_engine_"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """The figures for one number of streams. Rates are per second, CPU time is in cores."""

    streams: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    """First tokens within the measured interval, without the first request of each stream (all sent at once)."""
    burst_ttft_p50_ms: float
    burst_ttft_p99_ms: float
    """The first request of each stream."""
    all_ttft_p99_ms: float
    """Both, and requests still waiting at the end as if answered then."""
    unanswered: int
    itl_p50_ms: float
    itl_p99_ms: float
    errors: int
    first_error: str
    engine_tokens_per_s: float
    """Counted by the engine for ended requests; a difference to the above means that fronts lag behind."""
    steps_per_s: float
    step_ms: float
    """From launch to result of a step. Two steps are in flight at a time."""
    host_ms: float
    """Time of the engine's thread per step, without waiting for the device."""
    plan_ms: float
    tokens_per_step: float
    cached_share: float
    """Share of prompt tokens found in the prefix cache."""
    running: float
    waiting: float
    cores: dict[str, float]
    """CPU use by process: engine, front 0, front 1, …, and all clients together."""
    hot: dict[str, HotFunctions] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        found = {key: _rounded(value) for key, value in asdict(self).items()}
        found["cores"] = {name: round(value, 3) for name, value in self.cores.items()}
        del found["hot"]
        return {"engine": "millrace", "case": "serve", **found}


@dataclass(frozen=True, slots=True)
class ServeBench:
    server_options: tuple[str, ...]
    streams: tuple[int, ...] = (8, 64, 512, 2048, 8192)
    tokens: int = 128
    seconds: float = 10.0
    warm_up_s: float = 3.0
    clients: int = 6
    profiled: tuple[int, ...] = ()
    """Numbers of streams at which the server is also profiled, after the measured interval."""

    def run(self, progress: Progress) -> Iterator[ServingFigures]:
        with LocalServer(self.server_options) as server:
            progress("starting the server")
            ready_s = asyncio.run(server.wait_ready())
            progress(f"ready after {ready_s:.1f} s; waiting until all graphs are captured")
            warm_s = await_warm(server)
            progress(f"warm after {ready_s + warm_s:.1f} s")
            model = model_name(server)
            for streams in self.streams:
                progress(f"{streams:,} streams")
                yield self.measure(server, model, streams)
                await_idle(server)

    def measure(self, server: LocalServer, model: str, streams: int) -> ServingFigures:
        context = multiprocessing.get_context("spawn")
        with ExitStack() as cleanup:
            clients = ClientProcesses(
                context,
                cleanup,
                port=server.port,
                model=model,
                streams=streams,
                num_tokens=self.tokens,
                count=self.clients,
            )
            pids = server_processes(server.pid)
            further_s = PROFILE_S + 1.0 if streams in self.profiled else 0.0
            begin, end = clients.begin(warm_up_s=self.warm_up_s, seconds=self.seconds, further_s=further_s)
            before = _reading_at(begin, server, pids, clients.pids)
            after = _reading_at(end, server, pids, clients.pids)
            hot = sample_processes(_worth_sampling(pids), PROFILE_S) if streams in self.profiled else {}
            return self._figures(streams, clients.results(), before, after, hot)

    def _figures(
        self, streams: int, tally: Tally, before: Reading, after: Reading, hot: dict[str, HotFunctions]
    ) -> ServingFigures:
        if not tally.whole:
            raise BenchError(
                f"No answer was completed with {streams} open streams. Use more --seconds or fewer --tokens."
                f" Errors: {tally.errors}, the first: {tally.first_error or 'none'}"
            )
        spent, wall_s = after.minus(before), after.at - before.at
        counted_s = after.counted_at - before.counted_at
        tokens_per_s = tally.frames * self.tokens * tally.whole / tally.whole_frames / self.seconds
        steps = spent.get("steps", 0.0) or float("nan")
        first_ms, burst_ms = _to_ms(tally.first_s), _to_ms(tally.burst_s)
        # Events that arrived together have a gap of 0.
        gap_ms = [0.0] * tally.merged + _to_ms(tally.gap_s)
        all_ttft_ms = _to_ms([*tally.first_s, *tally.burst_s, *tally.unanswered_s])
        return ServingFigures(
            streams=streams,
            seconds=self.seconds,
            requests_per_s=tally.requests / self.seconds,
            output_tokens_per_s=tokens_per_s,
            ttft_p50_ms=percentile(first_ms, 50),
            ttft_p99_ms=percentile(first_ms, 99),
            burst_ttft_p50_ms=percentile(burst_ms, 50),
            burst_ttft_p99_ms=percentile(burst_ms, 99),
            all_ttft_p99_ms=percentile(all_ttft_ms, 99),
            unanswered=len(tally.unanswered_s),
            itl_p50_ms=percentile(gap_ms, 50),
            itl_p99_ms=percentile(gap_ms, 99),
            errors=tally.errors,
            first_error=tally.first_error,
            engine_tokens_per_s=spent.get("output_tokens", 0.0) / counted_s,
            steps_per_s=spent.get("steps", 0.0) / counted_s,
            step_ms=1e3 * spent.get("step_seconds", 0.0) / steps,
            host_ms=1e3 * spent.get("host_seconds", 0.0) / steps,
            plan_ms=1e3 * spent.get("plan_seconds", 0.0) / steps,
            tokens_per_step=spent.get("output_tokens", 0.0) / steps,  # Both from the same scrape.
            cached_share=spent.get("prefix_hit_tokens", 0.0) / (spent.get("prefix_query_tokens", 0.0) or float("nan")),
            running=after.gauges.get("millrace_running_requests", 0.0),
            waiting=after.gauges.get("millrace_waiting_requests", 0.0),
            cores={name: (used - before.cpu_s[name]) / wall_s for name, used in after.cpu_s.items()},
            hot=hot,
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU time of the processes and values of the metrics at one moment."""

    at: float
    cpu_s: dict[str, float]
    counted_at: float
    """When the scrape returned; on a busy machine clearly later than `at`."""
    gauges: dict[str, float]

    def minus(self, earlier: Reading) -> dict[str, float]:
        """Differences of the engine's counters, by short name."""
        return {
            name.removeprefix(ENGINE).removesuffix("_total"): value - earlier.gauges.get(name, 0.0)
            for name, value in self.gauges.items()
            if name.startswith(ENGINE) and name.endswith("_total")
        }


def _reading_at(moment: float, server: LocalServer, pids: dict[str, int], clients: list[int]) -> Reading:
    time.sleep(max(0.0, moment - time.monotonic()))
    cpu_s = {name: own_cpu_seconds(pid) for name, pid in pids.items()}
    cpu_s["clients"] = sum(map(own_cpu_seconds, clients))
    at, gauges = time.monotonic(), scrape(server.url)
    return Reading(at, cpu_s, time.monotonic(), gauges)


def server_processes(pid: int) -> dict[str, int]:
    """The processes of a server by role. The server's main process is front 0."""
    found = {"front 0": pid}
    for child in descendants(pid):
        words = command_line(child)
        if "millrace.supervise.engine_child" in words:
            found["engine"] = child
        elif "millrace.supervise.front_child" in words:
            found[f"front {words[words.index('millrace.supervise.front_child') + 2]}"] = child
    return dict(sorted(found.items()))


def _worth_sampling(pids: dict[str, int]) -> dict[str, int]:
    return {name: pid for name, pid in pids.items() if name in ("engine", "front 0", "front 1")}


def model_name(server: LocalServer) -> str:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=SCRAPE_TIMEOUT_S) as response:
        return str(json.loads(response.read())["data"][0]["id"])


def await_warm(server: LocalServer) -> float:
    """Wait until the engine has captured all graphs, or up to the limit. Returns seconds waited."""
    began = time.monotonic()
    while time.monotonic() - began < WARM_LIMIT_S and scrape(server.url).get(f"{ENGINE}graphs_left", 1.0) > 0:
        time.sleep(0.1)
    return time.monotonic() - began


def await_idle(server: LocalServer) -> None:
    end = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < end:
        found = scrape(server.url)
        if not found.get("millrace_running_requests") and not found.get("millrace_waiting_requests"):
            return
        time.sleep(0.1)
    raise BenchError(f"The server was still busy {IDLE_LIMIT_S:g} s after its clients had disconnected.")


def _rounded(value: object) -> object:
    """JSON has no NaN: a figure without a value is null."""
    if not isinstance(value, float):
        return value
    return round(value, 3) if math.isfinite(value) else None


def _to_ms(seconds: Iterable[float]) -> list[float]:
    return [1e3 * value for value in seconds]
