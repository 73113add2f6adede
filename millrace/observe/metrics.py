"""Prometheus metrics of a front: its HTTP requests, counted as each ends, and the engine's last report.

Nothing here runs per token. The engine sends its counters as `EngineStats` a few times a second; they are turned into
metrics only when `/metrics` is scraped.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from millrace.link.messages import Finish
from millrace.observe.engine_metrics import EngineCollector, EngineView, engine_metrics, tenant_metrics
from millrace.observe.slo.metrics import SloCollector
from millrace.observe.slo.objective import Objective
from millrace.observe.slo.tracker import SloTracker
from millrace.observe.vllm_metrics import VllmCollector
from millrace.params import CLASS_NAMES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOTALS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960)
_LAGS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(slots=True)
class Counts:
    """The counters that /v1/stats reads, as plain numbers."""

    requests: int = 0
    errors: int = 0
    client_errors: int = 0
    refused: int = 0
    by_code: Tally[str] = field(default_factory=Tally)


class FrontMetrics:
    """Metrics of one front, in their own registry, so that one process can hold several fronts."""

    def __init__(self, engine: EngineView, objectives: tuple[Objective, ...] = ()) -> None:
        self.counts = Counts()
        self.slos = SloTracker(objectives)
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "millrace_requests",
            "HTTP requests by route, status and, if text was generated, finish reason.",
            ("route", "status", "finish_reason"),
            registry=registry,
        )
        self.errors = Counter(
            "millrace_errors", "Requests that ended with an error, by its code.", ("code",), registry=registry
        )
        self.e2e = Histogram(
            "millrace_e2e_seconds",
            "Time from a request's arrival to the end of its answer.",
            buckets=_TOTALS_S,
            registry=registry,
        )
        self.loop_lag = Histogram(
            "millrace_event_loop_lag_seconds",
            "How late the front's event loop ran a timer.",
            buckets=_LAGS_S,
            registry=registry,
        )
        self._add_token_counters(registry)
        self.open_requests = Gauge("millrace_open_requests", "Requests that are generating.", registry=registry)
        self.open_streams = Gauge("millrace_open_streams", "Streaming requests that are generating.", registry=registry)
        self.slow_client_drops = Counter(
            "millrace_slow_client_drops", "Streams closed because their client read too slowly.", registry=registry
        )
        self.client_disconnects = Counter(
            "millrace_client_disconnects", "Requests whose client disconnected before the end.", registry=registry
        )
        self.refused = Counter(
            "millrace_refused_requests",
            "Requests refused with a 429, by priority class.",
            ("priority",),
            registry=registry,
        )
        ProcessCollector(registry=registry)
        self._engine_registry = CollectorRegistry()
        self.fronts_up = Gauge(
            "millrace_fronts_up", "Fronts that answered this scrape.", registry=self._engine_registry
        )
        self.fronts_up.set(1)
        self.front_restarts = Counter(
            "millrace_front_restarts", "Fronts that were restarted after they died.", registry=registry
        )
        self._engines, self._tenants = EngineCollector(engine, engine_metrics), EngineCollector(engine, tenant_metrics)
        self._engine_registry.register(self._engines)
        self._engine_registry.register(SloCollector(self.slos))
        self._tenant_registry = CollectorRegistry()
        self._tenant_registry.register(self._tenants)
        self._vllm_registry = CollectorRegistry()
        self._vllm_registry.register(VllmCollector(engine))

    def add_engine(self, first: str, model: str, engine: EngineView) -> None:
        """Report the engine of a further model than the `first`. Their metrics then have a label `model`."""
        self._engines.add(first, model, engine)
        self._tenants.add(first, model, engine)

    def _add_token_counters(self, registry: CollectorRegistry) -> None:
        self.sequences = Counter("millrace_sequences", "Ended sequences, by class.", ("priority",), registry=registry)
        self.good_sequences = Counter(
            "millrace_good_sequences",
            "Goodput: ended sequences that met every objective of their class.",
            ("priority",),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "millrace_request_prompt_tokens", "Prompt tokens of ended sequences.", registry=registry
        )
        self.cached_tokens = Counter(
            "millrace_request_cached_tokens",
            "Prompt tokens of ended sequences that were found in the prefix cache.",
            registry=registry,
        )
        self.reasoning_tokens = Counter(
            "millrace_request_reasoning_tokens", "Output tokens of reasoning, of ended requests.", registry=registry
        )
        self.output_tokens = Counter(
            "millrace_request_output_tokens", "Generated tokens of ended sequences.", registry=registry
        )

    def count_request(self, route: str, status: int, finish_reason: str) -> None:
        self.counts.requests += 1
        self.requests.labels(route, str(status), finish_reason).inc()

    def count_error(self, code: str, status: int) -> None:
        """`code`: of our own errors, so there are few."""
        counts = self.counts
        counts.by_code[code] += 1
        if status >= 500:
            counts.errors += 1
        elif status != 429:
            counts.client_errors += 1
        self.errors.labels(code).inc()

    def count_refusal(self, class_name: str) -> None:
        self.counts.refused += 1
        self.refused.labels(class_name).inc()

    def observe_sequence(self, finish: Finish, priority: int, before_submit_s: float) -> None:
        """Count one ended sequence. `before_submit_s`: the front's time before it submitted the request."""
        self.sequences.labels(CLASS_NAMES[priority]).inc()
        if is_good(finish, priority, before_submit_s, self.slos.objectives):
            self.good_sequences.labels(CLASS_NAMES[priority]).inc()
        self.prompt_tokens.inc(finish.prompt_tokens)
        self.cached_tokens.inc(finish.cached_tokens)
        self.output_tokens.inc(finish.output_tokens)

    def own_part(self) -> bytes:
        """The page of this front's own metrics."""
        return generate_latest(self.registry)

    def engine_part(self, *, vllm_names: bool = False, with_tenants: bool = True) -> bytes:
        """The page of the engine's metrics, which is the same for all fronts."""
        page = generate_latest(self._engine_registry)
        if with_tenants:
            page += generate_latest(self._tenant_registry)
        return page + generate_latest(self._vllm_registry) if vllm_names else page


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
    return all(values[one.metric] <= one.limit_s for one in objectives if one.priority in (None, priority))
