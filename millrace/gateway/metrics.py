"""Prometheus metrics of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from millrace.gateway.fleet import Fleet
from millrace.gateway.limits.limits import Limits
from millrace.gateway.replica import Replica

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class GatewayMetrics:
    def __init__(self, fleet: Fleet, limits: Limits) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "millrace_gateway_requests", "Requests by route and status.", ("route", "status"), registry=registry
        )
        self.decisions = Counter(
            "millrace_gateway_decisions",
            "Routing decisions by replica and cause.",
            ("replica", "cause"),
            registry=registry,
        )
        self.resumes = Counter(
            "millrace_gateway_resumes", "Streams that went on at another replica, by how.", ("how",), registry=registry
        )
        self.first_byte = Histogram(
            "millrace_gateway_first_data_seconds",
            "Time to the first data of a stream.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.matched = Counter(
            "millrace_gateway_matched_prompt_tokens", "Prompt tokens that were probably cached.", registry=registry
        )
        self.prompt = Counter("millrace_gateway_prompt_tokens", "Prompt tokens, estimated.", registry=registry)
        shared = Gauge(
            "millrace_gateway_limits_shared",
            "1: quotas and budgets hold over all gateways; 0: this gateway counts its own requests.",
            registry=registry,
        )
        shared.set_function(lambda: limits.scope == "shared")
        registry.register(_ReplicaCollector(fleet))
        ProcessCollector(registry=registry)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _ReplicaCollector:
    """Gauges of the replicas, read when they are scraped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        now, replicas = self._fleet.clock(), self._fleet.replicas.items()
        figures: dict[str, tuple[str, Callable[[Replica], float]]] = {
            "share": ("Share of its weight that a replica gets; 0: ejected.", lambda one: one.health.share(now)),
            "open_requests": ("Requests open at a replica.", lambda one: len(one.attempts)),
            "outstanding_tokens": ("Tokens to compute at a replica.", lambda one: one.outstanding_tokens),
            "token_ms": ("Time between two frames of a stream.", lambda one: one.token_ms),
            "failures": ("Failures of a replica since the start.", lambda one: one.num_failed),
            "ejections": ("Ejections of a replica since the start.", lambda one: one.health.num_ejections),
            "kv_used": ("Share of the KV blocks in use, as reported.", lambda one: one.load.kv_used),
        }
        for name, (text, read) in figures.items():
            family = GaugeMetricFamily(f"millrace_gateway_replica_{name}", text, labels=["replica"])
            for replica_name, replica in replicas:
                family.add_metric([replica_name], read(replica))
            yield family
