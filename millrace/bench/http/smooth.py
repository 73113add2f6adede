"""Streams beside another tenant's long prompt, and a small tenant's requests beside another's many streams.

Two servers run side by side, one with the given settings and one without a target for steps (`--step-ms 0`). Each case
alternates between them, so that a machine with other work treats both alike. The prompts differ each time: the prefix
cache must not help. The bars hold for the server with a target.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import tomli_w

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.http.prompts import IdPrompts
from millrace.bench.http.target import Sample, Target
from millrace.bench.http.workloads import RequestShape
from millrace.bench.local_server import LocalServer
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, Tenant, digest_of

SMOOTH = "smooth"
"""The server with a target for steps."""
BIG, SMALL = "big", "small"
"""The two tenants. Their keys are their names."""
LONG_PROMPT = 4000
STREAM_TOKENS = 4000
"""More than a stream can draw while the prompt is computed."""
BIG_SHAPE, SMALL_SHAPE = (32, 256), (32, 16)
"""Prompt and output tokens of the many streams, and of the small tenant's requests."""
SETTLE_S = 2.0
START_LIMIT_S = 120.0
"""Longest wait for the many streams to begin."""
PAUSE_S = 0.5
"""Between two requests of the small tenant."""
LIMIT_S, MAX_ROUNDS = 50.0, 4
"""By default no round begins after this time, nor after this many. A round takes 30 to 90 s."""
GAP_P99_MS, GAP_MOST_MS, SMALL_P50_S, SMALL_MOST_S, LEAST_RATIO = 250.0, 500.0, 6.0, 10.0, 0.9
"""Bars: gaps of the chat stream, the small tenant's requests, and tokens per second over those without a target."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SmoothBench:
    server_options: tuple[str, ...]
    rounds: int | None = None
    """None: as many as begin within `LIMIT_S`, up to `MAX_ROUNDS`."""
    streams: int = 60
    seconds: float = 10.0
    """Of one round with many streams."""
    seed: int = 0

    async def run(self, progress: Progress) -> list[Figure]:
        """All figures, of both servers."""
        with tempfile.TemporaryDirectory() as folder:
            keys = _write_keys(Path(folder) / "keys.toml")
            options = (*self.server_options, "--keys-file", str(keys))
            async with AsyncExitStack() as stack:
                progress("starting two servers")
                runs = [
                    Run(SMOOTH, await stack.enter_async_context(_server(options, self.seed))),
                    Run("off", await stack.enter_async_context(_server((*options, "--step-ms", "0"), self.seed))),
                ]
                began = time.monotonic()
                for number in range(self.rounds or MAX_ROUNDS):
                    if self.rounds is None and number and time.monotonic() - began > LIMIT_S:
                        break
                    for at, run in enumerate(runs):
                        progress(f"round {number + 1}, {run.name}: a long prompt")
                        await run.long_prompt(2 * number + at)
                        progress(f"round {number + 1}, {run.name}: many streams")
                        await run.many_streams(2 * number + at, self.streams, self.seconds)
        return [figure for run in runs for figure in run.figures()] + list(compared(*runs))


@dataclass(frozen=True, slots=True)
class Clients:
    """One server, with a client of each tenant."""

    big: Target
    small: Target
    prompts: IdPrompts

    def prompt(self, group: str, index: int, num_tokens: int) -> list[int]:
        made = self.prompts.make(RequestShape(group, index, shared_tokens=0, own_tokens=num_tokens, output_tokens=1))
        assert isinstance(made, list)
        return made


@dataclass(slots=True)
class Run:
    """What one server did."""

    name: str
    clients: Clients
    gaps_s: list[float] = field(default_factory=list)
    """Of the chat stream, while the other tenant's prompt was computed."""
    long_ttft_s: list[float] = field(default_factory=list)
    long_rates: list[float] = field(default_factory=list)
    small_s: list[float] = field(default_factory=list)
    stream_rates: list[float] = field(default_factory=list)

    async def long_prompt(self, number: int) -> None:
        """One chat stream of the small tenant, and a prompt of the big one."""
        times: list[float] = []
        chat_prompt = self.clients.prompt("chat", number, 32)
        chat = asyncio.create_task(self.clients.small.complete(chat_prompt, STREAM_TOKENS, times.append))
        await asyncio.sleep(SETTLE_S)
        if chat.done():
            raise BenchError(f"The chat stream ended at once: {chat.result().error}")
        try:
            found = _good(await self.clients.big.complete(self.clients.prompt("long", number, LONG_PROMPT), 1))
            if chat.done():
                raise BenchError(f"The chat stream ended before the prompt was computed: {chat.result().error}")
        finally:
            chat.cancel()
            await asyncio.gather(chat, return_exceptions=True)
        ends = [*(at for at in times if found.started_at < at < found.first_token_at), found.first_token_at]
        before = max((at for at in times if at <= found.started_at), default=found.started_at)
        self.gaps_s += [after - at for at, after in zip([before, *ends], ends, strict=False)]
        took_s = found.first_token_at - found.started_at
        self.long_ttft_s.append(took_s)
        self.long_rates.append((LONG_PROMPT + len(ends)) / took_s)
        await asyncio.sleep(PAUSE_S)

    async def many_streams(self, number: int, streams: int, seconds: float) -> None:
        """Many streams of the big tenant, one request after the other, and short requests of the small one."""
        times: list[float] = []
        first_times: list[float] = []
        tasks = [asyncio.create_task(self._stream(number, at, times, first_times)) for at in range(streams)]
        try:
            await _until_all_stream(times, tasks)
            began = time.monotonic()
            index = 0
            while time.monotonic() - began < seconds:
                _check(tasks)
                prompt = self.clients.prompt(f"small {number}", index, SMALL_SHAPE[0])
                found = _good(await self.clients.small.complete(prompt, SMALL_SHAPE[1], times.append))
                first_times.append(found.first_token_at)
                self.small_s.append(found.ended_at - found.started_at)
                index += 1
                await asyncio.sleep(PAUSE_S)
            ended = time.monotonic()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        num_tokens = sum(began <= at <= ended for at in times)
        num_tokens += BIG_SHAPE[0] * sum(began <= at <= ended for at in first_times)
        self.stream_rates.append(num_tokens / (ended - began))
        await asyncio.sleep(PAUSE_S)

    async def _stream(self, number: int, at: int, times: list[float], first_times: list[float]) -> None:
        for turn in range(1 << 30):
            prompt = self.clients.prompt(f"big {number} {at}", turn, BIG_SHAPE[0])
            found = _good(await self.clients.big.complete(prompt, BIG_SHAPE[1], times.append))
            first_times.append(found.first_token_at)

    def figures(self) -> Iterator[Figure]:
        long, many = f"{self.name}: beside {LONG_PROMPT:,} tokens", f"{self.name}: beside many streams"
        gaps_ms = [1e3 * gap for gap in self.gaps_s]
        for label, value, bar in (("p50", 50, 0.0), ("p99", 99, GAP_P99_MS), ("most", 100, GAP_MOST_MS)):
            yield self._held(Figure(long, f"gap {label}", percentile(gaps_ms, value), "ms", len(gaps_ms)), bar)
        yield Figure(long, "TTFT of the prompt", percentile(self.long_ttft_s, 50), "s", len(self.long_ttft_s))
        yield Figure(long, "tokens, prompt and output", percentile(self.long_rates, 50), "/s")
        for label, value, bar in (("p50", 50, SMALL_P50_S), ("most", 100, SMALL_MOST_S)):
            name, taken_s = f"small tenant's 16 tokens, {label}", percentile(self.small_s, value)
            yield self._held(Figure(many, name, taken_s, "s", len(self.small_s)), bar)
        yield Figure(many, "tokens, prompt and output", percentile(self.stream_rates, 50), "/s")

    def _held(self, figure: Figure, bar: float) -> Figure:
        """The figure with its bar, which only the server with a target has."""
        if not bar or self.name != SMOOTH:
            return figure
        return replace(figure, note=f"bar {bar:g} {figure.unit}: {_verdict(figure.value <= bar)}")


def compared(smooth: Run, off: Run) -> Iterator[Figure]:
    for name, ours, theirs in (
        ("beside a long prompt", smooth.long_rates, off.long_rates),
        ("beside many streams", smooth.stream_rates, off.stream_rates),
    ):
        ratio = percentile(ours, 50) / percentile(theirs, 50)
        note = f"bar {LEAST_RATIO:g}: {_verdict(ratio >= LEAST_RATIO)}"
        yield Figure("tokens, smooth over off", name, ratio, "x", note=note)


def verdicts(figures: Sequence[Figure]) -> list[str]:
    """One line for each bar."""
    return [
        f"{figure.workload}, {figure.metric}: {figure.value:.3g} {figure.unit}, {figure.note}"
        for figure in figures
        if figure.note
    ]


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


async def _until_all_stream(times: list[float], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until each stream has drawn about two tokens."""
    end = time.monotonic() + START_LIMIT_S
    while len(times) < 2 * len(tasks):
        _check(tasks)
        if time.monotonic() > end:
            raise BenchError(
                f"{len(tasks)} streams drew {len(times)} tokens within {START_LIMIT_S:.0f} s; lower --streams."
            )
        await asyncio.sleep(0.1)


def _check(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise what ended a stream: the figures would be those of fewer."""
    for task in tasks:
        if task.done():
            task.result()


def _good(sample: Sample) -> Sample:
    if sample.error:
        raise BenchError(f"A request failed: {sample.error}")
    return sample


@asynccontextmanager
async def _server(options: Sequence[str], seed: int) -> AsyncIterator[Clients]:
    with LocalServer(options) as server:
        await server.wait_ready()
        async with Target(server.url, api_key=BIG) as big, Target(server.url, api_key=SMALL) as small:
            prompts = await big.probe(seed)
            await small.find_model()
            if not isinstance(prompts, IdPrompts):
                raise BenchError("The server does not take prompts as token ids.")
            yield Clients(big, small, prompts)


def _write_keys(file: Path) -> Path:
    tenants = {name: {"keys": [DIGEST_PREFIX + digest_of(name).hex()]} for name in (BIG, SMALL)}
    msgspec.convert(tenants, dict[str, Tenant])
    file.write_text(tomli_w.dumps({"tenants": tenants}), encoding="utf-8")
    return file
