"""Dollars per million tokens, the largest items of the bill, and what other settings would change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace.link.engine_stats import EngineStats, TenantFigures
from millrace.link.messages import EngineReady
from millrace.observe.cost.fit import FittedCosts, changes, fit
from millrace.observe.history import Sample

MILLION = 1e6


def cost_report(
    samples: list[Sample],
    ready: EngineReady | None,
    price_per_hour: float,
    tenant: str | None = None,
    *,
    beside: list[list[Sample]] | None = None,
) -> dict[str, Any]:
    """Over the samples, at most the last quarter of an hour. `tenant`: only its own part, without adapters, which may
    be other tenants' too; None = all.

    `beside`: samples of the other models on the machine. All models together pay the machine's price: each its share
    of the device time that they used, whether the device was idle in between or several used it at once.
    """
    known = [sample for sample in samples if sample.stats is not None]
    first, last = _same_engine(known)
    report: dict[str, Any] = {"object": "cost", "price_per_hour": price_per_hour, "usd_per_million": None}
    if first is None or last is None or last.time <= first.time:
        return report | {"note": "No work has been measured yet."}
    costs = fit(changes(known))
    if costs is None:
        return report | {"note": "Fewer than 5 seconds of work in the last 15 minutes; send some requests."}
    assert first.stats is not None
    assert last.stats is not None
    others_s = sum(_busy_since(first.time, one) for one in beside or [])
    window = _Window(first.stats, last.stats, last.time - first.time, others_s)
    return report | _priced(window, costs, ready, price_per_hour, tenant)


@dataclass(frozen=True, slots=True)
class _Window:
    first: EngineStats
    last: EngineStats
    seconds: float
    others_s: float
    """Device time that the machine's other models used meanwhile."""


def _busy_since(start: float, samples: list[Sample]) -> float:
    """Device seconds of a model's engines since `start` (Unix seconds)."""
    recent = [sample.stats.device_seconds for sample in samples if sample.time >= start and sample.stats is not None]
    return sum(max(0.0, after - before) for before, after in zip(recent, recent[1:], strict=False))


def _same_engine(samples: list[Sample]) -> tuple[Sample | None, Sample | None]:
    """First and last sample since the engine last started."""
    if not samples:
        return None, None
    begin = len(samples) - 1
    while begin and _step(samples[begin - 1]) <= _step(samples[begin]):
        begin -= 1
    return samples[begin], samples[-1]


def _step(sample: Sample) -> int:
    return sample.stats.step_no if sample.stats is not None else 0


def _priced(
    window: _Window, costs: FittedCosts, ready: EngineReady | None, price_per_hour: float, tenant: str | None
) -> dict[str, Any]:
    per_s = price_per_hour / 3600
    first, last, seconds = window.first, window.last, window.seconds
    busy_s = min(seconds, last.device_seconds - first.device_seconds)
    steps = last.step_no - first.step_no
    prefill, decode = last.prefill_tokens - first.prefill_tokens, last.decode_tokens - first.decode_tokens
    used_s = busy_s + window.others_s
    all_in = seconds / used_s if used_s > 0 else 1.0
    at_once = min(1.0, all_in)
    per_token = _token_seconds(costs, steps, prefill, decode, last)
    usd = {
        name: {
            "busy": MILLION * per_s * value * at_once,
            "all_in": MILLION * per_s * value * all_in,
            "interval": [MILLION * per_s * low * all_in, MILLION * per_s * high * all_in],
        }
        for name, (value, low, high) in per_token.items()
    }
    items = _items(window, busy_s, costs, at_once, price_per_hour)
    return {
        "window_s": round(seconds, 1),
        "utilisation": busy_s / seconds,
        "step_costs": {
            "step_ms": 1e3 * costs.step_s,
            "prefill_token_us": 1e6 * costs.prefill_token_s,
            "decode_token_us": 1e6 * costs.decode_token_s,
            "intervals_s": costs.intervals,
            "samples": costs.num_samples,
        },
        "usd_per_million": usd,
        "largest_items": items[:3],
        "items": items,
        "what_if": _what_if(costs, steps, prefill, decode, busy_s, ready),
        "tenants": _shares(last.tenants, "tenant", per_token, per_s * all_in, tenant),
        "adapters": []
        if last.adapters is None or tenant is not None
        else _shares(last.adapters.each, "adapter", per_token, per_s * all_in),
    }


def _token_seconds(
    costs: FittedCosts, steps: int, prefill: int, decode: int, last: EngineStats
) -> dict[str, tuple[float, float, float]]:
    """Device seconds of a token of each kind, with its interval. Steps are shared by the tokens they computed."""
    share = steps / max(1, prefill + decode)

    def of(part: str) -> tuple[float, float, float]:
        low, high = costs.intervals[part]
        step_low, step_high = costs.intervals["step_s"]
        value = costs.prefill_token_s if part == "prefill_token_s" else costs.decode_token_s
        return value + share * costs.step_s, low + share * step_low, high + share * step_high

    # A cached token is looked up and not computed: all of the scheduler's time over all looked-up tokens is a bound.
    looked_up = last.plan_seconds / last.prefix_query_tokens if last.prefix_query_tokens else 0.0
    output = of("decode_token_s")
    return {
        "input": of("prefill_token_s"),
        "cached": (looked_up, 0.0, looked_up),
        "output": output,
        "reasoning": output,
    }


def _items(
    window: _Window, busy_s: float, costs: FittedCosts, at_once: float, price_per_hour: float
) -> list[dict[str, Any]]:
    """Where the money went, largest first. `at_once`: share of its device time that a model pays for, below 1 if
    several used the device at once."""
    first, last, seconds = window.first, window.last, window.seconds
    steps, decode = last.step_no - first.step_no, last.decode_tokens - first.decode_tokens
    prefill = last.prefill_tokens - first.prefill_tokens
    drafted = last.drafted_tokens - first.drafted_tokens - (last.accepted_tokens - first.accepted_tokens)
    spent = {
        "idle device": max(0.0, seconds - busy_s - window.others_s),
        "the machine's other models": window.others_s,
        "fixed part of steps (reading weights, launching)": costs.step_s * steps,
        "computing prompt tokens": costs.prefill_token_s * prefill,
        "decoding output tokens": costs.decode_token_s * max(0, decode - drafted),
        "drafts that were not accepted": costs.decode_token_s * drafted,
    }
    found = [
        {"item": name, "share": share, "usd_per_hour": share * price_per_hour}
        for name, value in spent.items()
        if (share := value / seconds * (1.0 if name == "idle device" else at_once)) > 0
    ]
    return sorted(found, key=lambda item: -float(str(item["share"])))


def _what_if(
    costs: FittedCosts, steps: int, prefill: int, decode: int, busy_s: float, ready: EngineReady | None
) -> list[dict[str, Any]]:
    """Device time per token under other settings, as a ratio to now, from the fitted parts."""
    fixed = costs.step_s * steps
    total = fixed + costs.prefill_token_s * prefill + costs.decode_token_s * decode
    if total <= 0:
        return []
    is_16_bit = ready is not None and ready.dtype in ("bfloat16", "float16") and ready.device_flops > 0
    found = [
        {
            "change": "twice as many rows per step",
            "cost_ratio": (total - fixed / 2) / total,
            "why": "the fixed part of a step is shared by twice as many tokens; its latency grows by the rest",
        },
        {
            "change": "a model with half the parameters",
            "cost_ratio": 0.5,
            "why": "reading weights and computing tokens both go with the parameters",
        },
    ]
    if is_16_bit:
        ratio = (total - fixed / 2 - 0.5 * costs.prefill_token_s * prefill) / total
        why = "weights are read in half the bytes, and prompts are computed at up to twice the rate"
        found.insert(1, {"change": "FP8 weights (--quantization fp8)", "cost_ratio": ratio, "why": why})
    else:
        why = "needs a GPU with FP8 and weights in 16 bits; its effect cannot be read from these figures"
        found.insert(1, {"change": "FP8 weights (--quantization fp8)", "cost_ratio": None, "why": why})
    return found


def _shares(
    figures: Iterable[TenantFigures],
    label: str,
    per_token: dict[str, tuple[float, float, float]],
    usd_per_s: float,
    own: str | None = None,
) -> list[dict[str, Any]]:
    """Dollars of ended requests since the engine started, at the present price per token. `own`: only of this name."""
    found = []
    for one in figures:
        if own is not None and one.name != own:
            continue
        seconds = (
            (one.prompt_tokens - one.cached_tokens) * per_token["input"][0]
            + one.cached_tokens * per_token["cached"][0]
            + one.output_tokens * per_token["output"][0]
        )
        found.append({label: one.name, "requests": one.requests, "usd": seconds * usd_per_s})
    return sorted(found, key=lambda one: -float(str(one["usd"])))
