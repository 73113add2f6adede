"""The bars for Millrace's figures relative to its peers, and whether a run meets them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from millrace.bench.peers.spec import LLAMA, MILLRACE, OPENVINO, VLLM, kind_of

Key = tuple[str, str]
"""Workload and metric."""

SINGLE, MIXED, SHARED, SERVER = "single", "mixed", "shared-prefix", "server"


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for one figure of Millrace: a multiple of the best peer's figure, or an absolute value without peers."""

    workload: str
    metric: str
    unit: str
    limit: float
    goal: float | None = None
    peers: tuple[str, ...] = ()
    more_is_better: bool = False

    @property
    def key(self) -> Key:
        return self.workload, self.metric


_IDLE_PERCENT = 0.5
"""Percent of one core; the resolution is one kernel clock tick in the watched interval."""

BARS: Mapping[str, tuple[Bar, ...]] = {
    "smollm2-135m": (
        Bar(SINGLE, "decode", "tok/s", 1.5, 3.0, (LLAMA,), more_is_better=True),
        Bar(SINGLE, "TTFT p50", "ms", 0.6, 0.4, (VLLM, OPENVINO)),
        Bar(MIXED, "output", "tok/s", 1.8, 3.0, (VLLM, OPENVINO), more_is_better=True),
        Bar(SHARED, "output", "tok/s", 2.0, None, (VLLM,), more_is_better=True),
        Bar(SERVER, "start to first token", "s", 4.0, 2.0),
        Bar(SERVER, "memory at rest", "MB", 800.0, 500.0),
        Bar(SERVER, "CPU at idle", "%", _IDLE_PERCENT),
    ),
    "qwen2.5-coder-1.5b": (
        Bar(SINGLE, "decode", "tok/s", 1.2, None, (LLAMA,), more_is_better=True),
        Bar(SINGLE, "TTFT p50", "ms", 0.7, None, (LLAMA,)),
        Bar(SERVER, "CPU at idle", "%", _IDLE_PERCENT),
    ),
}


def bars_for(model: str) -> str:
    """Name of the set of bars for a model name or path; '' if there is none."""
    lowered = model.lower()
    return next((name for name in BARS if name in lowered), "")


def wanted_workloads(bars: tuple[Bar, ...], kind: str) -> tuple[str, ...]:
    """The workloads whose bars name this kind of engine; for Millrace, all that name any peer."""
    names = [bar.workload for bar in bars if bar.peers and (kind in bar.peers or kind == MILLRACE)]
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Verdict:
    bar: Bar
    ours: float | None
    theirs: float | None = None
    against: str = ""
    """The best peer."""
    absent: tuple[str, ...] = ()
    """Peers of the bar that were not measured."""

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's; for a bar without peers, our figure."""
        if not self.bar.peers:
            return self.ours
        if self.ours is None or not self.theirs:
            return None
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        return self._holds(self.bar.limit)

    @property
    def goal_met(self) -> bool | None:
        return None if self.bar.goal is None else self._holds(self.bar.goal)

    def _holds(self, limit: float) -> bool | None:
        """None if it was not measured."""
        if self.ratio is None or not math.isfinite(self.ratio):
            return None
        return self.ratio >= limit if self.bar.more_is_better else self.ratio <= limit


class ResultTable:
    """The figures of a run by engine, and their medians over the rounds."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Key, list[float]]] = {}
        self._units: dict[Key, str] = {}

    def add(self, engine: str, key: Key, value: float, unit: str) -> None:
        self._units.setdefault(key, unit)
        if math.isfinite(value):
            self._values.setdefault(engine, {}).setdefault(key, []).append(value)

    @property
    def engines(self) -> list[str]:
        return list(self._values)

    @property
    def keys(self) -> list[Key]:
        return list(self._units)

    def unit(self, key: Key) -> str:
        return self._units.get(key, "")

    def values(self, engine: str, key: Key) -> list[float]:
        return self._values.get(engine, {}).get(key, [])

    def median(self, engine: str, key: Key) -> float | None:
        values = self.values(engine, key)
        return median(values) if values else None

    def judge(self, bar: Bar, own: str = MILLRACE) -> Verdict:
        """`own` is the name under which Millrace was measured."""
        ours = self.median(own, bar.key)
        found = {
            name: value
            for name in self.engines
            if name != own and kind_of(name) in bar.peers and (value := self.median(name, bar.key)) is not None
        }
        absent = tuple(kind for kind in bar.peers if kind not in {kind_of(name) for name in found})
        if not found:
            return Verdict(bar, ours, absent=absent)
        best = (max if bar.more_is_better else min)(found, key=lambda name: found[name])
        return Verdict(bar, ours, found[best], best, absent)
