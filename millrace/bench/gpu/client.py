"""Starts an engine as `serve` does, submits batches to it and times their tokens.

The engine runs in its own process and this side does as little as possible per token, so that the engine is measured.
Times are on `time.monotonic`, taken where a user's code would see the token.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.bench.errors import BenchError
from millrace.config import Config
from millrace.link.client import EngineClient
from millrace.link.engine_stats import EngineStats
from millrace.link.messages import EngineLoading, EngineReady, Finish, TokenLogprobs
from millrace.params.sampling import SamplingParams
from millrace.supervise.engine_process import EngineHandle, start_engine

DRAIN_TIMEOUT_S = 30.0
WARM_TIMEOUT_S = 120.0
_ASK_EVERY_S = 1.0
_POLL_S = 0.02


class Row:
    """Receives the tokens of one request; keeps their count and the times of the first and of the end."""

    __slots__ = ("_batch", "count", "finish", "finished_at", "first_at")

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.count = 0
        self.first_at = self.finished_at = 0.0
        self.finish: Finish | None = None

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if not self.count:
            self.first_at = time.monotonic()
        self.count += 1

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        pass

    def on_finish(self, finish: Finish) -> None:
        self.finish, self.finished_at = finish, time.monotonic()
        self._batch.on_row_done()


class TimedRow(Row):
    """Also keeps the time of every token."""

    __slots__ = ("times",)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.times: list[float] = []

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.times.append(time.monotonic())
        if not self.count:
            self.first_at = self.times[0]
        self.count += 1


class Batch:
    """Requests submitted together, and their results."""

    def __init__(self, outputs: Sequence[int], row_type: type[Row]) -> None:
        self.outputs = outputs
        self.rows = [row_type(self) for _ in outputs]
        self.started_at = 0.0
        self._open = len(outputs)
        self._all_done = asyncio.Event()

    def on_row_done(self) -> None:
        self._open -= 1
        if not self._open:
            self._all_done.set()

    async def wait(self) -> None:
        await self._all_done.wait()

    @property
    def seconds(self) -> float:
        """From the first submission to the end of the last request."""
        return max(row.finished_at for row in self.rows) - self.started_at

    @property
    def first_token_s(self) -> float:
        """From the first submission until every request had its first token."""
        return max(row.first_at for row in self.rows) - self.started_at

    @property
    def output_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def cached_tokens(self) -> int:
        return sum(row.finish.cached_tokens for row in self.rows if row.finish is not None)

    def check(self) -> None:
        """Raise unless every request ran to its full length; other figures would be wrong."""
        bad = [
            (row, wanted)
            for row, wanted in zip(self.rows, self.outputs, strict=True)
            if row.finish is None or row.finish.reason != "length" or row.count != wanted
        ]
        if bad:
            row, wanted = bad[0]
            reason = row.finish.message or row.finish.reason if row.finish is not None else "no answer"
            raise BenchError(
                f"{len(bad)} of {len(self.rows)} requests did not complete; the first returned {row.count} of"
                f" {wanted} tokens: {reason}"
            )


@dataclass(frozen=True, slots=True)
class DecodePace:
    seconds_per_step: float
    steps: int
    all_rows: bool
    """True if every row was running in all of these steps."""


def decode_pace(rows: Sequence[TimedRow]) -> DecodePace:
    """Wall time per step while all rows decode: from the last row's first token until the first row ends.

    Every row gets one token per step, so the token times of the row that started last are the step times. If rows end
    before the last one starts, there is no such interval and all tokens of that row count.
    """
    latest = max(rows, key=lambda row: row.times[0])
    first_end = min(row.times[-1] for row in rows)
    tokens = bisect_right(latest.times, first_end)
    all_rows = tokens >= 2 and first_end > latest.times[0]
    if not all_rows:
        tokens = len(latest.times)
    if tokens < 2:
        raise BenchError("Time per step needs at least 2 output tokens per request. Raise --scale.")
    return DecodePace((latest.times[tokens - 1] - latest.times[0]) / (tokens - 1), tokens - 1, all_rows)


class Prompts:
    """Prompts of random token ids; no two share a prefix."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def make(self, num_tokens: int) -> list[int]:
        found: list[int] = self._rng.integers(0, self._vocab_size, num_tokens).tolist()
        return found

    def batch(self, size: int, num_tokens: int) -> list[list[int]]:
        return [self.make(num_tokens) for _ in range(size)]

    @staticmethod
    def lengths(count: int, low: int, high: int) -> tuple[list[int], list[int]]:
        """Prompt and output lengths, uniform in [low, high]; the same in every run."""
        rng = np.random.default_rng(count)
        return rng.integers(low, high + 1, count).tolist(), rng.integers(low, high + 1, count).tolist()


class EngineSession:
    """One running engine and the client that drives it."""

    def __init__(self, handle: EngineHandle, client: EngineClient, ready: EngineReady, started_at: float) -> None:
        self._handle = handle
        self.client = client
        self.ready = ready
        self.started_at = started_at
        self.ready_s = time.monotonic() - started_at

    @classmethod
    async def start(
        cls, config: Config, *, timeout_s: float, on_loading: Callable[[EngineLoading], None] | None = None
    ) -> EngineSession:
        """Start an engine with these settings and wait until it takes requests."""
        started_at = time.monotonic()
        handle = start_engine(config)
        client: EngineClient | None = None
        try:
            client = EngineClient(handle.channel(), on_loading=on_loading)
            handle.watch(asyncio.get_running_loop(), client.fail)
            ready = await client.wait_ready(timeout_s)
        except BaseException:
            if client is not None:
                await client.close()
            handle.stop()
            raise
        return cls(handle, client, ready, started_at)

    async def stop(self) -> None:
        await self.client.close()
        self._handle.stop()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: int | Sequence[int],
        *,
        row_type: type[Row] = Row,
        params: Sequence[SamplingParams] | None = None,
    ) -> Batch:
        """Run all prompts at once to full length, greedily unless there are `params`. If cancelled, aborts the open
        requests."""
        per_row = [outputs] * len(prompts) if isinstance(outputs, int) else list(outputs)
        greedy = {n: SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in set(per_row)}
        asked = [greedy[n] for n in per_row] if params is None else params
        batch = Batch(per_row, row_type)
        ids: list[int] = []
        batch.started_at = time.monotonic()
        try:
            for prompt, row, own in zip(prompts, batch.rows, asked, strict=True):
                ids.append(self.client.submit(prompt, own, row))
            await batch.wait()
        finally:
            for request_id in ids:
                self.client.abort(request_id)  # Does nothing for requests that have ended.
        batch.check()
        return batch

    async def wait_warm(self, timeout_s: float) -> float | None:
        """Seconds from the start until the engine was warm; None if it does not report it.

        An idle engine sends no reports, so it is asked for a token now and then.
        """
        until = time.monotonic() + min(timeout_s, WARM_TIMEOUT_S)
        asked_at = time.monotonic()
        while time.monotonic() < until:
            stats = self.client.stats  # None until the first report, shortly after the first token.
            if self.client.failure is not None or (stats is not None and is_warm(stats) is None):
                return None
            if is_warm(stats):
                return time.monotonic() - self.started_at
            if time.monotonic() - asked_at > _ASK_EVERY_S:
                async with asyncio.timeout(timeout_s):
                    await self.generate([[0]], 1)
                asked_at = time.monotonic()
            await asyncio.sleep(_POLL_S)
        return None

    async def recover(self) -> bool:
        """After a failed figure, wait for the aborted requests to end. False if the engine cannot be used any more."""
        until = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < until and self.client.failure is None:
            if not self.client.num_open:
                return True
            await asyncio.sleep(_POLL_S)
        return False


def is_warm(stats: EngineStats | None) -> bool | None:
    """True if every graph is captured, by `graphs_left` or `warm`; None if the engine reports neither."""
    left = getattr(stats, "graphs_left", None)
    if left is not None:
        return int(left) == 0
    warm = getattr(stats, "warm", None)
    return None if warm is None else bool(warm)
