"""Prometheus metrics of a front: its HTTP requests, counted as each ends, and the last report of each engine.

Nothing here runs per token. An engine sends its counters as `EngineStats` a few times a second; they are turned into
metrics only when `/metrics` is scraped.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from millrace.observe.device_use import device_use
from millrace.observe.engine_metrics import EngineView, engine_metrics, resume_metrics, tenant_metrics
from millrace.observe.model_figures import ByModel, ModelFigures
from millrace.observe.slo.metrics import slo_metrics
from millrace.observe.slo.objective import Objective
from millrace.observe.vllm_metrics import VllmCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LAGS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(slots=True)
class Counts:
    """The counters that /v1/stats reads, as plain numbers."""

    requests: int = 0
    errors: int = 0
    client_errors: int = 0
    refused: int = 0
    asked: int = 0
    """POST requests: those that ask for work."""
    failed: int = 0
    """Those of them that got a 5xx, or a stream that ended with one."""
    by_code: Tally[str] = field(default_factory=Tally)


class FrontMetrics:
    """Metrics of one front, in their own registry, so that one process can hold several fronts."""

    def __init__(self, engines: Mapping[str, EngineView], objectives: tuple[Objective, ...] = ()) -> None:
        """`engines` by the name of their model."""
        self.counts = Counts()
        self._objectives = objectives
        self.models: dict[str, ModelFigures] = {}
        for name, engine in engines.items():
            self.add_model(name, engine)
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
        self.asked = Counter("millrace_asked_requests", "HTTP requests that asked for work (POST).", registry=registry)
        self.failed = Counter(
            "millrace_failed_requests",
            "Those of them that failed for a reason of the server, also in the middle of a stream.",
            registry=registry,
        )
        self.loop_lag = Histogram(
            "millrace_event_loop_lag_seconds",
            "How late the front's event loop ran a timer.",
            buckets=_LAGS_S,
            registry=registry,
        )
        self.open_requests = Gauge("millrace_open_requests", "Requests that are generating.", registry=registry)
        self.open_streams = Gauge("millrace_open_streams", "Streaming requests that are generating.", registry=registry)
        self.slow_client_drops = Counter(
            "millrace_slow_client_drops", "Streams closed because their client read too slowly.", registry=registry
        )
        self.client_disconnects = Counter(
            "millrace_client_disconnects", "Requests whose client disconnected before the end.", registry=registry
        )
        self.front_restarts = Counter(
            "millrace_front_restarts", "Fronts that were restarted after they died.", registry=registry
        )
        registry.register(ByModel(self.models, lambda model: iter(model.registry.collect())))
        registry.register(ByModel(self.models, lambda model: resume_metrics(model.engine)))
        ProcessCollector(registry=registry)
        self._engine_registry = CollectorRegistry()
        self.fronts_up = Gauge(
            "millrace_fronts_up", "Fronts that answered this scrape.", registry=self._engine_registry
        )
        self.fronts_up.set(1)
        self._engine_registry.register(ByModel(self.models, lambda model: engine_metrics(model.engine)))
        self._engine_registry.register(
            ByModel(self.models, lambda model: device_use(model.history.all(), model.engine.ready))
        )
        self._engine_registry.register(ByModel(self.models, lambda model: slo_metrics(model.slos)))
        self._tenant_registry = CollectorRegistry()
        self._tenant_registry.register(ByModel(self.models, lambda model: tenant_metrics(model.engine)))
        self._vllm_registry = CollectorRegistry()
        self._vllm_registry.register(VllmCollector(self.models))

    def add_model(self, name: str, engine: EngineView) -> None:
        self.models[name] = ModelFigures(engine, self._objectives)

    def count_request(self, route: str, status: int, finish_reason: str) -> None:
        self.counts.requests += 1
        self.requests.labels(route, str(status), finish_reason).inc()

    def count_asked(self, of_adapter: tuple[str, str] | None = None, *, has_failed: bool) -> None:
        """`of_adapter`: the model and its adapter that was asked for, if one was."""
        self.counts.asked += 1
        self.asked.inc()
        if has_failed:
            self.counts.failed += 1
            self.failed.inc()
        if of_adapter is not None:
            model, adapter = of_adapter
            self.models[model].count_asked(adapter, has_failed=has_failed)

    def count_error(self, code: str, status: int) -> None:
        """`code`: of our own errors, so there are few."""
        counts = self.counts
        counts.by_code[code] += 1
        if status >= 500:
            counts.errors += 1
        elif status != 429:
            counts.client_errors += 1
        self.errors.labels(code).inc()

    def count_refusal(self, model: str, class_name: str) -> None:
        self.counts.refused += 1
        self.models[model].refused.labels(class_name).inc()

    def own_part(self) -> bytes:
        """The page of this front's own metrics."""
        return generate_latest(self.registry)

    def engine_part(self, *, vllm_names: bool = False, with_tenants: bool = True) -> bytes:
        """The page of the engines' metrics, which is the same for all fronts."""
        page = generate_latest(self._engine_registry)
        if with_tenants:
            page += generate_latest(self._tenant_registry)
        return page + generate_latest(self._vllm_registry) if vllm_names else page
