"""What a front knows of one model's work: its engine's last report, the last minutes, objectives and request counters.

A page of metrics has the figures of every model; those of a server with several models carry a label `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from millrace.link.messages import Finish
from millrace.observe.engine_metrics import EngineView
from millrace.observe.history import History
from millrace.observe.slo.objective import Objective
from millrace.observe.slo.tracker import SloTracker
from millrace.params.classes import CLASS_NAMES

_TOTALS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960)


@dataclass(slots=True)
class AdapterRequests:
    """Of one adapter, as `Counts` of the server."""

    asked: int = 0
    failed: int = 0


class ModelFigures:
    def __init__(self, engine: EngineView, objectives: tuple[Objective, ...]) -> None:
        self.engine = engine
        self.history = History()
        self.slos = SloTracker(objectives)
        registry = self.registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        self.e2e = Histogram(
            "millrace_e2e_seconds",
            "Time from a request's arrival to the end of its answer.",
            buckets=_TOTALS_S,
            registry=registry,
        )
        self.refused = counter(
            "millrace_refused_requests", "Requests refused with a 429, by priority class.", ("priority",)
        )
        self.fetches = counter(
            "millrace_kv_fetches",
            "Prompts whose KV blocks a gateway saw at another replica, by what became of fetching them.",
            ("outcome",),
        )
        self.fetched_tokens = counter("millrace_kv_fetched_tokens", "Prompt tokens fetched from other replicas.")
        self.fetched_bytes = counter("millrace_kv_fetched_bytes", "Bytes of KV blocks fetched from other replicas.")
        self.fetch_seconds = counter("millrace_kv_fetch_seconds", "Time that requests waited for such blocks.")
        self.sequences = counter("millrace_sequences", "Ended sequences, by class.", ("priority",))
        self.good_sequences = counter(
            "millrace_good_sequences",
            "Goodput: ended sequences that met every objective of their class.",
            ("priority",),
        )
        self.adapter_requests = {
            one.adapter: AdapterRequests() for one in objectives if one.adapter and one.is_about_errors
        }
        """By adapter with an objective about errors."""
        self._adapters_asked = self._adapter_counter(
            "asked", "Requests for an adapter that has an objective about errors."
        )
        self._adapters_failed = self._adapter_counter(
            "failed", "Those of them that failed for a reason of the server, also in the middle of a stream."
        )
        self.prompt_tokens = counter("millrace_request_prompt_tokens", "Prompt tokens of ended sequences.")
        self.cached_tokens = counter(
            "millrace_request_cached_tokens",
            "Prompt tokens of ended sequences that were found in the prefix cache.",
        )
        self.reasoning_tokens = counter(
            "millrace_request_reasoning_tokens", "Output tokens of reasoning, of ended requests."
        )
        self.output_tokens = counter("millrace_request_output_tokens", "Generated tokens of ended sequences.")

    def _adapter_counter(self, kind: str, text: str) -> Counter:
        counter = Counter(f"millrace_adapter_{kind}_requests", text, ("adapter",), registry=self.registry)
        for name in self.adapter_requests:
            counter.labels(name)
        return counter

    def count_asked(self, adapter: str, *, has_failed: bool) -> None:
        if (own := self.adapter_requests.get(adapter)) is None:
            return
        own.asked += 1
        self._adapters_asked.labels(adapter).inc()
        if has_failed:
            own.failed += 1
            self._adapters_failed.labels(adapter).inc()

    def sample_objectives(self, now: float, asked: int, failed: int) -> None:
        """`asked`, `failed`: requests of the whole server."""
        of_adapters = {name: (one.asked, one.failed) for name, one in self.adapter_requests.items()}
        self.slos.sample(now, self.engine.stats, asked, failed, of_adapters)

    def observe_sequence(self, finish: Finish, priority: int, before_submit_s: float, adapter: str = "") -> None:
        """Count one ended sequence. `before_submit_s`: the front's time before it submitted the request."""
        self.sequences.labels(CLASS_NAMES[priority]).inc()
        objectives = tuple(one for one in self.slos.objectives if one.adapter in ("", adapter))
        if is_good(finish, priority, before_submit_s, objectives):
            self.good_sequences.labels(CLASS_NAMES[priority]).inc()
        self.prompt_tokens.inc(finish.prompt_tokens)
        self.cached_tokens.inc(finish.cached_tokens)
        self.output_tokens.inc(finish.output_tokens)


class ByModel(Collector):
    """The metrics of each model, with a label `model` if there are several models."""

    def __init__(self, models: dict[str, ModelFigures], metrics_of: Callable[[ModelFigures], Iterator[Metric]]) -> None:
        self._models = models
        self._metrics_of = metrics_of

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, figures in self._models.items():
            for family in self._metrics_of(figures):
                merged = families.setdefault(family.name, family)
                samples = family.samples
                if len(self._models) > 1:
                    samples = [sample._replace(labels={"model": model, **sample.labels}) for sample in samples]
                merged.samples = samples if merged is family else merged.samples + samples
        yield from families.values()


def is_good(finish: Finish, priority: int, before_submit_s: float, objectives: tuple[Objective, ...]) -> bool:
    """True if a sequence ended well and within the limits. Its gaps count by their mean."""
    if finish.reason not in ("stop", "length"):
        return False
    tpot_s = max(0.0, finish.total_s - finish.first_token_s) / max(1, finish.output_tokens - 1)
    values = {
        "ttft": before_submit_s + finish.first_token_s,
        "itl": tpot_s,
        "tpot": tpot_s,
        "queue": finish.queued_s,
        "e2e": before_submit_s + finish.total_s,
    }
    return all(
        values[one.metric] <= one.limit_s
        for one in objectives
        if not one.is_about_errors and one.priority in (None, priority)
    )
