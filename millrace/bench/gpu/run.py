"""Runs `millrace bench gpu`: one engine per model, started as `serve` does, through every case in turn.

Every figure becomes a record as soon as it is measured. A figure that fails becomes a record with `error`, and the
run continues, on a new engine if the old one has died. Every wait has a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from millrace.bench.errors import BenchError
from millrace.bench.gpu.cases import Bench, Measured, Sizes, Unit, units
from millrace.bench.gpu.client import EngineSession, Prompts
from millrace.bench.gpu.models import GpuModel
from millrace.bench.gpu.peer_figures import Peers
from millrace.errors import MillraceError
from millrace.link.messages import EngineLoading

MAX_STARTS = 3
"""Engines per model: the first, and replacements for engines that died."""
_FIRST_PROMPT = 16

Record = dict[str, object]
Report = Callable[[Record], None]
Progress = Callable[[str, int, int], None]
"""Called with what is running, done, total."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    cases: tuple[str, ...]
    sizes: Sizes
    seed: int
    quick: bool
    time_limit_s: float
    """Per figure, and per start of an engine."""
    peers: Peers | None
    """None if they do not apply, as with scaled sizes."""


async def run_models(models: list[GpuModel], options: GpuOptions, report: Report, progress: Progress) -> None:
    for model in models:
        await _ModelRun(model, options, report, progress).run()


class _ModelRun:
    """One model through all cases."""

    def __init__(self, model: GpuModel, options: GpuOptions, report: Report, progress: Progress) -> None:
        self._model = model
        self._options = options
        self._report = report
        self._progress = progress
        self._session: EngineSession | None = None
        self._prompts: Prompts | None = None
        self._starts = 0
        self._device = ""

    async def run(self) -> None:
        todo = units(self._options.cases, self._options.sizes, quick=self._options.quick)
        try:
            for done, unit in enumerate([None, *todo]):
                self._progress(self._title(unit), done, len(todo) + 1)
                await self._guarded(unit)
        finally:
            await self._stop()

    async def _guarded(self, unit: Unit | None) -> None:
        """Measure one figure (None: the start of the engine) and emit it, or the reason why it failed."""
        case, about = (unit.case, unit.about) if unit is not None else ("startup", {})
        try:
            measured = await self._start() if self._session is None else {}
            if unit is not None:
                measured = await self._measure(unit)
        except Exception as error:
            self._emit(case, about, {"error": _sentence(error, self._options.time_limit_s)})
            if self._session is not None and not await self._session.recover():
                await self._stop()
            return
        if unit is not None or "startup" in self._options.cases:
            self._emit(case, about, measured)

    async def _measure(self, unit: Unit) -> Measured:
        session, prompts = self._session, self._prompts
        if session is None or prompts is None:
            raise AssertionError("the engine has been started")
        room = min(session.ready.max_context, session.ready.kv_tokens)
        if unit.context > room:
            return {"skipped": f"needs {unit.context} tokens of context; {room} available"}
        bench = Bench(session, prompts, self._options.sizes, self._options.quick)
        async with asyncio.timeout(self._options.time_limit_s):
            return await unit.run(bench)

    async def _start(self) -> Measured:
        """Start the engine: seconds to the first token, until ready, and until warm."""
        if self._starts == MAX_STARTS:
            raise BenchError(f"Not measured: the engine did not start, or died {MAX_STARTS} times.")
        self._starts += 1
        limit_s = self._options.time_limit_s
        try:
            session = await EngineSession.start(self._model.config, timeout_s=limit_s, on_loading=self._on_loading)
        except Exception:
            self._starts = MAX_STARTS  # If it fails to start once, do not try again.
            raise
        self._session, self._device = session, session.ready.device
        # The same prompts for every dtype of a shape.
        self._prompts = Prompts(self._options.seed + self._starts - 1, session.ready.vocab_size)
        async with asyncio.timeout(limit_s):
            first = await session.generate([self._prompts.make(_FIRST_PROMPT)], 1)
        measured: Measured = {
            "seconds": round(first.rows[0].first_at - session.started_at, 2),
            "ready_s": round(session.ready_s, 2),
        }
        self._progress(f"{self._model.label}: warming up", 0, 0)
        warm_s = await session.wait_warm(limit_s)
        return measured if warm_s is None else {**measured, "warm_s": round(warm_s, 2)}

    def _on_loading(self, loading: EngineLoading) -> None:
        self._progress(f"{self._model.label}: loading {loading.what}", loading.done, loading.total)

    def _emit(self, case: str, about: dict[str, int], measured: Measured) -> None:
        record: Record = {"engine": "millrace", "model": self._model.label, "case": case, **about, **measured}
        peers = self._options.peers
        if peers is not None and peers.device in self._device:
            record.update(peers.verdict(record))
        self._report({**record, "device": self._device} if self._device else record)

    def _title(self, unit: Unit | None) -> str:
        if unit is None:
            return f"{self._model.label}: starting the engine"
        return " ".join([f"{self._model.label}:", unit.case, *(f"{name} {n:,}" for name, n in unit.about.items())])

    async def _stop(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.stop()


def _sentence(error: Exception, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"Not completed within {limit_s:g} s. Raise --time-limit, or find out why it is slow."
    return error.message if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
