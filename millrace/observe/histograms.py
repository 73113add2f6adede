"""Histograms of a request's times and lengths, by priority class: one array that the engine fills and sends whole.

The engine adds to it in columns; fronts export it as Prometheus histograms. Percentiles come from the sketch beside it,
which holds the values since the last report.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.link.messages import Finish
from millrace.observe.sketch import Sketch
from millrace.params.classes import CLASS_NAMES

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.integer]
Part = tuple[int, Floats, Integers]
"""Kind, values, and the class of each."""

NUM_EDGES = 22
_WAITS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.35, 0.5, 0.75),
    *(1, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320),
)
_GAPS_S = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06),
    *(0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 20),
)
_TOTALS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4),
    *(6, 8, 12, 20, 30, 60, 120, 240, 480, 960),
)
_TOKENS = tuple(float(2**power) for power in range(NUM_EDGES))


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    name: str
    help: str
    edges: tuple[float, ...]
    """Upper bounds of the buckets, without infinity."""
    is_time: bool = True


SPECS = (
    HistogramSpec("ttft", "Time from a request's arrival to its first token.", _WAITS_S),
    HistogramSpec("itl", "Inter-token latency: every gap between two tokens of a sequence.", _GAPS_S),
    HistogramSpec("tpot", "Mean time per output token after the first, per sequence.", _GAPS_S),
    HistogramSpec("queue", "Time from submission to the first admission by the scheduler.", _WAITS_S),
    HistogramSpec("prefill", "Time from the first admission to the first token.", _WAITS_S),
    HistogramSpec("decode", "Time from the first token to the last.", _TOTALS_S),
    HistogramSpec("sequence", "Time from a request's arrival to the last token of a sequence.", _TOTALS_S),
    HistogramSpec("prompt_length", "Prompt tokens of ended sequences.", _TOKENS, is_time=False),
    HistogramSpec("output_length", "Output tokens of ended sequences.", _TOKENS, is_time=False),
)
TTFT, ITL, TPOT, QUEUE, PREFILL, DECODE, SEQUENCE, PROMPT_LENGTH, OUTPUT_LENGTH = range(len(SPECS))
NUM_CLASSES = len(CLASS_NAMES)
WIDTH = NUM_EDGES + 2
SHAPE = (len(SPECS), NUM_CLASSES, WIDTH)
"""Per histogram and class: the count of each bucket, the last one unbounded, then the sum of all values."""
_EDGES = np.array([spec.edges for spec in SPECS])
ENDED_VALUES = 7
"""Numbers that are kept of an ended sequence until they are counted."""


class Histograms:
    def __init__(self, data: bytes = b"") -> None:
        self._values: Floats = np.frombuffer(data, np.float64).reshape(SHAPE) if data else np.zeros(SHAPE)
        self._single = array("d")
        """Kind, class and value, one after the other, of what `observe` was given since `values` was last read."""
        self._ended = array("d")
        """The same for `observe_finish`: class, tokens of prompt and output, and the times of the finish."""
        self._sketch = Sketch()
        """Values since the last report, by line: `NUM_CLASSES` lines per histogram."""

    @property
    def values(self) -> Floats:
        """Counts and sums. What was observed one by one is added here, in columns: in the engine, a few times per
        second."""
        parts: list[Part] = []
        if self._single:
            single, self._single = np.frombuffer(self._single).reshape(-1, 3).T, array("d")
            kinds, priorities = single[:2].astype(np.int64)
            parts += [(kind, single[2, kinds == kind], priorities[kinds == kind]) for kind in set(kinds.tolist())]
        if self._ended:
            ended, self._ended = np.frombuffer(self._ended).reshape(-1, ENDED_VALUES).T, array("d")
            parts += _parts_of_ended(ended[0].astype(np.int64), *ended[1:])
        if parts:
            self._add(parts)
        return self._values

    def _add(self, parts: list[Part], nums: Integers | None = None) -> None:
        """`nums`: how often each value counts; once by default."""
        values = np.concatenate([own for _, own, _ in parts])
        lines = np.concatenate([NUM_CLASSES * kind + priorities for kind, _, priorities in parts])
        places = np.concatenate([_EDGES[kind].searchsorted(own) for kind, own, _ in parts]) + WIDTH * lines
        self._sketch.add(lines, values, nums)
        by_line = self._values.reshape(-1, WIDTH)
        by_line += np.bincount(places, nums, by_line.size).reshape(by_line.shape)
        by_line[:, -1] += np.bincount(lines, values if nums is None else values * nums, len(by_line))

    def observe(self, kind: int, priority: int, value: float) -> None:
        """Once per request and kind, not per token."""
        self._single.extend((kind, priority, value))

    def observe_finish(self, finish: Finish, priority: int, before_submit_s: float) -> None:
        """A sequence ended. `before_submit_s`: the front's time before it submitted the request."""
        if finish.output_tokens == 0:
            self.observe(PROMPT_LENGTH, priority, finish.prompt_tokens)
            return
        times = (finish.queued_s, finish.first_token_s, finish.total_s, before_submit_s)
        self._ended.extend((priority, finish.prompt_tokens, finish.output_tokens, *times))

    def observe_gaps(self, gaps: Floats, priorities: Integers, nums: Integers | None = None) -> None:
        """Inter-token gaps of some sequences. `nums`: how many sequences have each gap; one by default."""
        self._add([(ITL, gaps, priorities)], nums)

    def tobytes(self) -> bytes:
        return self.values.tobytes()

    def take_sketch(self) -> bytes:
        """The values that were counted since the last time."""
        self.values  # noqa: B018  Counts what was observed one by one.
        return self._sketch.take().tobytes()


def _parts_of_ended(
    priorities: Integers,
    num_prompt: Floats,
    num_output: Floats,
    queued_s: Floats,
    first_s: Floats,
    total_s: Floats,
    before_s: Floats,
) -> list[Part]:
    """Arguments and values are columns over ended sequences, see `observe_finish`."""
    decode_s, has_several = np.maximum(0.0, total_s - first_s), num_output > 1
    return [
        (PROMPT_LENGTH, num_prompt, priorities),
        (OUTPUT_LENGTH, num_output, priorities),
        (QUEUE, queued_s, priorities),
        (PREFILL, np.maximum(0.0, first_s - queued_s), priorities),
        (DECODE, decode_s, priorities),
        (SEQUENCE, before_s + total_s, priorities),
        (TPOT, decode_s[has_several] / (num_output[has_several] - 1), priorities[has_several]),
    ]


def values_of(sketch: Sketch, kind: int) -> tuple[Floats, Floats]:
    """Values of a histogram and their counts, over all classes, in ascending order."""
    return sketch.of(NUM_CLASSES * kind, NUM_CLASSES * (kind + 1) - 1)


def share_within(spec: HistogramSpec, counts: Floats, limit: float) -> float:
    """Number of values up to `limit`, interpolated within the bucket that contains it."""
    index = int(np.searchsorted(spec.edges, limit))
    within = float(counts[:index].sum())
    if index < len(spec.edges):
        lower = spec.edges[index - 1] if index else 0.0
        within += float(counts[index]) * (limit - lower) / (spec.edges[index] - lower)
    return within
