"""Drafts on a GPU shape: speed against concurrency and acceptance, with drafts replayed from a first run.

One engine without drafts, one whose controller chooses their number, and one for each fixed number run side by side;
a round asks each of them for the same answers, one after the other. The first answers come from the engine without
drafts. Their tokens become the drafts of the others, each spoilt with probability 1 - acceptance: so every draft is
right with that probability, given that those before it were.

With random weights the likeliest tokens are close together: rounding, which differs with the number of places, would
soon lead an answer away from the recorded one. So the layers' outputs are so small here that they vanish beside the
embedding, and the next token follows from the last one alone. The work of a step is the same.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from millrace.bench.errors import BenchError
from millrace.bench.gpu.client import Batch, EngineSession, Prompts, TimedRow
from millrace.bench.gpu.models import GpuModel
from millrace.config import Config, Speculation
from millrace.link.messages import TokenLogprobs
from millrace.models.weights.random_weights import RESIDUAL_KEY
from millrace.params.sampling import SamplingParams

BATCHES, ACCEPTANCES, LENGTHS = (1, 8, 32, 128), (0.0, 0.6, 0.8), (1, 3, 7)
OFF, AUTO = "off", "auto"
LEAST, NEAR_BEST = 0.98, 0.95
"""What drafts must reach of the speed without them, and the controller of the best fixed number."""
WARM_UP = 2
"""Rounds before those that count: the controller's last probe may be 256 steps away."""
_VANISHING = 1e-8
_SPARE_TOKENS = 64
"""KV blocks beyond those of all requests, per request: drafts in flight need some."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SweepSizes:
    batches: tuple[int, ...] = BATCHES
    acceptances: tuple[float, ...] = ACCEPTANCES
    lengths: tuple[int, ...] = LENGTHS
    rounds: int = 2
    prompt: int = 128
    output: int = 256


@dataclass(frozen=True, slots=True)
class SweepPoint:
    batch: int
    acceptance: float
    rates: dict[str, list[float]]
    """By engine, tokens per second of each round, all requests together, while all of them decode."""
    equal: dict[str, float] = field(default_factory=dict)
    """By engine with drafts: share of its tokens that are the recorded ones."""

    def ratio(self, engine: str) -> float:
        """Speed against no drafts: the median of the rounds."""
        pairs = zip(self.rates[engine], self.rates[OFF], strict=True)
        return statistics.median(own / off for own, off in pairs)

    @property
    def best_fixed(self) -> str:
        return max((name for name in self.rates if name not in (OFF, AUTO)), key=self.ratio)

    @property
    def failures(self) -> list[str]:
        """What the controller must reach and did not."""
        auto, best = self.ratio(AUTO), max(1.0, self.ratio(self.best_fixed))
        failed = [] if auto >= LEAST else [f"auto is {auto:.3f} of off"]
        return failed if auto >= NEAR_BEST * best else [*failed, f"auto is {auto / best:.3f} of the best"]


class KeptRow(TimedRow):
    """Also keeps the tokens."""

    __slots__ = ("tokens",)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.tokens: list[int] = []

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        super().on_token(token_id, logprobs)
        self.tokens.append(token_id)


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all rows decode, by when each row got its tokens: from the last row's first token until
    the first row's last."""
    begun, ended = max(own[0] for own in times), min(own[-1] for own in times)
    if ended <= begun:
        raise BenchError("Some requests ended before the last one began. Ask for more tokens: raise --tokens.")
    return sum(bisect_right(own, ended) - bisect_right(own, begun) for own in times) / (ended - begun)


def spoilt(tokens: Sequence[int], acceptance: float, vocab_size: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Each token stays with probability `acceptance`; else another one takes its place."""
    recorded = np.array(tokens)
    wrong = rng.random(len(recorded)) >= acceptance
    return tuple(np.where(wrong, (recorded + 1) % vocab_size, recorded).tolist())


class Sweep:
    def __init__(self, model: GpuModel, sizes: SweepSizes, *, seed: int, time_limit_s: float) -> None:
        """`time_limit_s`: for the start of each engine, and for each run."""
        self._model, self._sizes, self._limit_s = model, sizes, time_limit_s
        self._rng, self._seed = np.random.default_rng(seed), seed
        self._sessions: dict[str, EngineSession] = {}

    async def run(self, progress: Progress) -> AsyncIterator[SweepPoint]:
        points = [(batch, share) for batch in self._sizes.batches for share in self._sizes.acceptances]
        folder = tempfile.TemporaryDirectory()
        try:
            steady = with_clear_choices(self._model.config, Path(folder.name))
            for done, (name, config) in enumerate(engine_configs(steady, self._sizes).items()):
                progress(f"{self._model.label}: starting the engine '{name}'", done, 2 + len(self._sizes.lengths))
                self._sessions[name] = await EngineSession.start(config, timeout_s=self._limit_s)
            for name, session in self._sessions.items():
                progress(f"{self._model.label}: warming up the engine '{name}'", 0, 0)
                await session.wait_warm(self._limit_s)
            for done, (batch, share) in enumerate(points):
                progress(f"{self._model.label}: {batch} at once, acceptance {share:g}", done, len(points))
                yield await self._point(batch, share)
        finally:
            for session in self._sessions.values():
                await session.stop()
            folder.cleanup()

    async def _point(self, batch: int, acceptance: float) -> SweepPoint:
        vocab_size = self._sessions[OFF].ready.vocab_size
        point = SweepPoint(batch, acceptance, {name: [] for name in self._sessions})
        equal: dict[str, list[float]] = {name: [] for name in self._sessions if name != OFF}
        for number in range(-WARM_UP, self._sizes.rounds):
            self._seed += 1
            prompts = Prompts(self._seed, vocab_size).batch(batch, self._sizes.prompt)
            first = await self._ask(OFF, prompts, [()] * batch)
            recorded = [row.tokens for row in first]
            drafts = [spoilt(tokens, acceptance, vocab_size, self._rng) for tokens in recorded]
            # Only the controller needs more than one round to warm up.
            names = [name for name in self._sessions if name == AUTO or (name != OFF and number >= -1)]
            found = {OFF: first}
            for name in names[:: 1 if number % 2 else -1]:
                found[name] = await self._ask(name, prompts, drafts)
                equal[name] += [
                    np.equal(row.tokens, own).mean() for row, own in zip(found[name], recorded, strict=True)
                ]
            if number >= 0:
                for name, rows in found.items():
                    point.rates[name].append(decode_rate([row.times for row in rows]))
        return replace(point, equal={name: float(np.mean(shares)) for name, shares in equal.items()})

    async def _ask(
        self, name: str, prompts: Sequence[Sequence[int]], drafts: Sequence[tuple[int, ...]]
    ) -> list[KeptRow]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=self._sizes.output, ignore_eos=True, prediction=own)
            for own in drafts
        ]
        async with asyncio.timeout(self._limit_s):
            batch = await self._sessions[name].generate(prompts, self._sizes.output, row_type=KeptRow, params=params)
        return [row for row in batch.rows if isinstance(row, KeptRow)]


def with_clear_choices(config: Config, folder: Path) -> Config:
    """The same shape with layers whose outputs vanish beside the embedding; see above. Writes it to the folder."""
    shape = json.loads(Path(config.model.source.removeprefix("random:")).read_text(encoding="utf-8"))
    file = folder / "config.json"
    file.write_text(json.dumps({**shape, RESIDUAL_KEY: _VANISHING}), encoding="utf-8")
    return replace(config, model=replace(config.model, source=f"random:{file}"))


def engine_configs(config: Config, sizes: SweepSizes) -> dict[str, Config]:
    """By name: the settings of each engine. All have the same small pool, so that they fit side by side."""
    room = max(sizes.batches) * (sizes.prompt + sizes.output + _SPARE_TOKENS)
    memory = replace(config.memory, kv_tokens=config.memory.kv_tokens or room)

    def engine(speculate: Speculation, draft_tokens: int = 0) -> Config:
        plan = replace(config.plan, speculate=speculate, draft_tokens=draft_tokens)
        return replace(config, plan=plan, memory=memory)

    return {OFF: engine("off"), AUTO: engine("replay"), **{str(n): engine("replay", n) for n in sizes.lengths}}
