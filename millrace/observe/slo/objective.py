"""An objective such as `ttft p95 < 500 ms`, optionally for one priority class: `interactive: itl p99 < 80 ms`, for one
adapter: `adapter pirate: ttft p95 < 1 s`, or for both; or a limit on the share of failed requests, of all or for one
adapter: `errors < 0.1%`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.params.classes import CLASS_NAMES

METRICS = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "queue": "time in the queue",
    "e2e": "time of the whole answer",
}
ERRORS = "errors"
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_FORM = re.compile(
    r"^(?:(?P<cls>[a-z]+)\s*:\s*)?(?P<metric>[a-z0-9]+)\s+p(?P<percent>\d{1,2}(?:\.\d+)?)\s*<=?\s*"
    r"(?P<limit>\d+(?:\.\d+)?)\s*(?P<unit>us|ms|s|min)$"
)

_ADAPTER_FORM = re.compile(r"^\s*adapter\s+(?P<name>[^\s:]+)\s*:(?P<rest>.*)$", re.IGNORECASE | re.DOTALL)
_ERRORS_FORM = re.compile(r"^errors\s*<=?\s*(?P<percent>\d{1,2}(?:\.\d+)?)\s*%$")


@dataclass(frozen=True, slots=True)
class Objective:
    metric: str
    """One of `METRICS`, or `ERRORS`."""
    percent: float
    """This share of all values, in percent, must be within the limit; of all requests, must not fail."""
    limit_s: float
    priority: int | None = None
    """Index into `CLASS_NAMES`; None = every class."""
    adapter: str = ""
    """Name of the adapter whose requests it is about; empty = all requests."""

    @property
    def is_about_errors(self) -> bool:
        return self.metric == ERRORS

    @property
    def share(self) -> float:
        return self.percent / 100

    @property
    def class_name(self) -> str:
        return CLASS_NAMES[self.priority] if self.priority is not None else "all"

    @property
    def name(self) -> str:
        """For metric labels and alert names."""
        form = f"{_errors_percent(self)}" if self.is_about_errors else f"p{self.percent:g}"
        name = f"{self.class_name}_{self.metric}_{form}".replace(".", "_")
        return f"adapter_{self.adapter}_{name}" if self.adapter else name

    def __str__(self) -> str:
        prefix = f"adapter {self.adapter}: " if self.adapter else ""
        if self.is_about_errors:
            return f"{prefix}errors < {_errors_percent(self)}%"
        limit = f"{1e3 * self.limit_s:g} ms" if self.limit_s < 1 else f"{self.limit_s:g} s"
        prefix += f"{self.class_name}: " if self.priority is not None else ""
        return f"{prefix}{self.metric} p{self.percent:g} < {limit}"


def _errors_percent(objective: Objective) -> str:
    return f"{100 - objective.percent:.10g}"


def parse_objective(text: str, *, may_name_adapter: bool = False) -> Objective:
    """`may_name_adapter`: only a running server knows its requests by adapter."""
    of_adapter = _ADAPTER_FORM.match(text)
    if of_adapter is None:
        return _parse(text)
    name, objective = of_adapter["name"], _parse(of_adapter["rest"])
    if not may_name_adapter:
        raise ConfigError(
            f"The objective {text!r} is for one adapter, which only a server can follow: give it to `millrace serve"
            " --slos`, and leave 'adapter NAME:' out here.",
            param="observe.slos",
        )
    return replace(objective, adapter=name)


def _parse(text: str) -> Objective:
    of_errors = _ERRORS_FORM.match(" ".join(text.lower().split()))
    if of_errors is not None and float(of_errors["percent"]) > 0:
        return Objective(ERRORS, 100 - float(of_errors["percent"]), 0.0)
    found = _FORM.match(" ".join(text.lower().split()))
    if found is None:
        raise ConfigError(
            f"The objective {text!r} is not of the form '[adapter NAME:] [CLASS:] METRIC pNN < TIME', such as"
            " 'ttft p95 < 500 ms', 'interactive: itl p99 < 80 ms' or 'adapter pirate: ttft p95 < 1 s', nor"
            " 'errors < PERCENT%', such as 'errors < 0.1%', which has no class.",
            param="observe.slos",
        )
    if found["metric"] not in METRICS:
        raise ConfigError(
            f"The objective {text!r} is about {found['metric']!r}; it must be one of {', '.join(METRICS)}.",
            param="observe.slos",
        )
    if found["cls"] is not None and found["cls"] not in CLASS_NAMES:
        raise ConfigError(
            f"The objective {text!r} is for class {found['cls']!r}; it must be one of {', '.join(CLASS_NAMES)}.",
            param="observe.slos",
        )
    percent, limit_s = float(found["percent"]), float(found["limit"]) * _UNITS_S[found["unit"]]
    if percent <= 0 or limit_s <= 0:
        raise ConfigError(f"The objective {text!r} needs a percentile and a time above 0.", param="observe.slos")
    priority = CLASS_NAMES.index(found["cls"]) if found["cls"] is not None else None
    return Objective(found["metric"], percent, limit_s, priority)


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Several of a server, separated by commas or semicolons."""
    return tuple(parse_objective(part, may_name_adapter=True) for part in re.split(r"[,;]", text) if part.strip())
