"""An answer of /v1/stats as a busy server gives it, for pictures of the dashboard."""

from __future__ import annotations

import math
from typing import Any

CLASSES = ("interactive", "standard", "batch")


def wave(base: float, swing: float, period: int, points: int, phase: float = 0.0) -> list[float]:
    return [
        max(0.0, base + swing * math.sin(at / period + phase) + 0.3 * swing * math.sin(at * 1.7 + phase))
        for at in range(points)
    ]


def prefix_tree() -> dict[str, Any]:
    states = {
        "in_use": 6_203,
        "shared": 3_560,
        "ending": 40,
        "moving": 96,
        "kept": 1_480,
        "cached": 10_631,
        "free": 6_402,
    }
    names = ("parent", "start", "tokens", "state", "location", "refs", "hits", "idle_s", "owner")
    rows: list[tuple[Any, ...]] = [
        (-1, 0, 2048, "shared", "device", 31, 4102, 0.2, ""),
        (0, 2048, 6144, "shared", "device", 4, 211, 0.4, ""),
        (1, 8192, 512, "in_use", "device", 1, 3, 0.1, ""),
        (1, 8192, 176, "cached", "device", 0, 0, 312.0, ""),
        (0, 2048, 992, "cached", "host", 0, 0, None, ""),
        (-1, 0, 16384, "kept", "device", 0, 96, 48.0, "5f0c91ab"),
        (5, 16384, 4096, "kept", "disk", 0, 0, None, "5f0c91ab"),
        (-1, None, 320, "cached", "disk", 0, 0, None, "c41b77d0"),
    ]
    nodes = [{"id": f"{at:08x}", **dict(zip(names, row, strict=True))} for at, row in enumerate(rows)]
    return {
        "object": "kv.tree",
        "model": "llama-3.1-8b-instruct",
        "block_tokens": 16,
        "states": {"device": states, "host": {"moving": 32, "cached": 20_968, "free": 39_000}},
        "nodes": nodes,
        "other_nodes": 310,
        "other_tokens": 41_216,
        "tokens": 131_072,
        "is_whole": False,
    }


def busy_stats(points: int = 60) -> dict[str, Any]:
    def spread(base: float) -> dict[str, list[float]]:
        return {
            name: wave(base * by, base * by / 4, 7, points, by) for name, by in (("p50", 1), ("p95", 2.4), ("p99", 4))
        }

    def by_class(base: float) -> dict[str, list[float]]:
        return {
            name: wave(base * by, base * by / 3, 9, points, by) for name, by in zip(CLASSES, (1, 3, 2), strict=True)
        }

    figures = ("running", "waiting", "requests", "input_tokens", "cached_tokens", "output_tokens")
    tenants = {"acme": (31, 2, 4210, 9_100_000, 6_000_000, 1_200_000), "globex": (9, 0, 811, 700_000, 90_000, 210_000)}
    return {
        "object": "stats",
        "model": "llama-3.1-8b-instruct",
        "time": 1.7e9,
        "window_s": 300,
        "step_s": 5,
        "uptime_s": 93_812.3,
        "view": {"tenant": "admin", "is_operator": True},
        "now": {
            "ready": True,
            "reason": None,
            "open_requests": 43,
            "open_streams": 40,
            "fronts": 4,
            "running": 41,
            "waiting": 2,
            "running_by_class": {"interactive": 7, "standard": 21, "batch": 13},
            "waiting_by_class": {"interactive": 0, "standard": 1, "batch": 1},
            "kv_blocks": {
                "device": {"total": 28_412, "used": 9_803, "cached": 12_207, "free": 6_402},
                "host": {"total": 60_000, "used": 21_000, "free": 39_000},
            },
            "block_size": 16,
        },
        "totals": {
            "requests": 5021,
            "input_tokens": 9_800_000,
            "cached_tokens": 6_090_000,
            "output_tokens": 1_410_000,
            "drafted_tokens": 40_000,
            "accepted_tokens": 27_000,
            "found_in": {
                "device": 5_100_000,
                "host": 800_000,
                "disk": 190_000,
                "documents": 260_000,
                "none": 3_450_000,
            },
            "evictions_by_reason": {"new_tokens": 31_200, "arrival": 940},
            "evictions_below": {"host": {"room": 12_100, "failed": 0, "forgotten": 88}},
            "errors": {"quota_exceeded": 41, "deadline_exceeded": 3, "context_length_exceeded": 12},
            "refused": 44,
        },
        "series": {
            "time": [1.7e9 + 5 * at for at in range(points)],
            "goodput_share": wave(0.9, 0.05, 9, points),
            "wasted_share": {
                name: wave(base, base / 2, 7, points, base)
                for name, base in (
                    ("cancelled", 0.02),
                    ("rejected_drafts", 0.05),
                    ("recomputed", 0.01),
                    ("padding", 0.02),
                )
            },
            "ttft_s": spread(0.12),
            "tpot_s": spread(0.011),
            "queue_s": spread(0.02),
            "requests_per_s": wave(14, 5, 8, points),
            "input_tokens_per_s": wave(22_000, 8000, 8, points),
            "cached_tokens_per_s": wave(13_000, 5000, 8, points, 1),
            "output_tokens_per_s": wave(3600, 900, 6, points),
            "running_by_class": by_class(7),
            "waiting_by_class": by_class(1),
            "kv_share": {
                "used": wave(0.35, 0.1, 9, points),
                "cached": wave(0.42, 0.05, 11, points),
                "host_used": wave(0.35, 0.02, 20, points),
            },
            "prefix_hit_rate": wave(0.61, 0.12, 10, points),
            "step_ms": {
                name: wave(base, base / 4, 7, points, base)
                for name, base in (("plan", 0.3), ("launch", 0.4), ("device", 9.2), ("apply", 0.5))
            },
            "prefill_tokens_per_step": wave(180, 90, 6, points),
            "decode_tokens_per_step": wave(39, 6, 9, points),
            "draft_acceptance": wave(0.67, 0.08, 8, points),
            "preemptions_per_s": wave(0, 0.2, 9, points),
            "evictions_per_s": wave(20, 15, 5, points),
            "errors_per_s": wave(0, 0.3, 5, points),
            "refused_per_s": wave(0.1, 0.4, 7, points),
            "bytes_per_s": [None, *wave(2.9e12, 5e11, 9, points - 1)],
            "flops": [None, *wave(1.9e14, 8e13, 7, points - 1)],
        },
        "latency": {
            name: {"n": 4210, "p50": base, "p95": 2.4 * base, "p99": 4 * base, "max": 5 * base}
            for name, base in (("ttft_s", 0.12), ("tpot_s", 0.011), ("queue_s", 0.02))
        },
        "limits": {"bytes_per_s": 4.8e12, "flops": 9.9e14},
        "tenants": [{"tenant": name, **dict(zip(figures, row, strict=True))} for name, row in tenants.items()],
        "slos": [
            {
                "slo": "TTFT p95 below 500 ms",
                "class": "interactive",
                "objective": 0.95,
                "good": 3871,
                "total": 4010,
                "budget_left": 0.31,
                "burn": {"5m": 0.4, "1h": 1.2},
                "is_met": True,
            },
            {
                "slo": "TPOT p95 below 20 ms",
                "class": "standard",
                "objective": 0.95,
                "good": 900,
                "total": 1001,
                "budget_left": 0.0,
                "burn": {"5m": 2.1, "1h": 2.0},
                "is_met": False,
            },
        ],
        "price_per_hour": 2.5,
    }


def cost() -> dict[str, Any]:
    """The parts of /v1/cost that the page shows."""
    prices = {"input": 0.021, "cached": 0.002, "output": 0.19, "reasoning": 0.19}
    return {
        "object": "cost",
        "price_per_hour": 2.5,
        "usd_per_million": {
            name: {"busy": 0.8 * price, "all_in": price, "interval": [0.9 * price, 1.1 * price]}
            for name, price in prices.items()
        },
    }


def busy_requests(number: int = 9, total: int | None = None) -> dict[str, Any]:
    data = [
        {
            "id": f"chatcmpl-{at:02d}7f3c2a91e84b0d",
            "object": "request",
            "request_id": f"req-{at}",
            "tenant": "acme" if at % 3 else "globex",
            "path": "/v1/chat/completions",
            "created_at": 1_700_000_000,
            "running_s": 41.2 - at * 4.1,
            "stream": True,
            "priority": CLASSES[at % 3],
            "num_sequences": 1,
            "prompt_tokens": 900 + 37 * at,
            "output_tokens": max(0, 410 - 60 * at),
        }
        for at in range(number)
    ]
    return {"object": "list", "data": data, "total": number if total is None else total}


def explanation(state: str = "running") -> dict[str, Any]:
    sequence = {
        "finish_reason": None,
        "message": None,
        "prompt_tokens": 1048,
        "output_tokens": None,
        "queue": {
            "ahead_on_arrival": 3,
            "waited_for_s": {"memory": 0.4},
            "why": "It waited 0.412 s: the KV pool had no room.",
        },
        "cache": {"cached_tokens": 512, "diverged_at_token": 512, "why": "Prompt token 512 is the first that differs."},
        "preemptions": {"count": 1, "reasons": {"memory": 1}},
        "stages_s": {"front": 0.003, "link": 0.0004, "queue": 0.412, "prefill": 0.31, "decode": 2.2, "total": 2.9254},
    }
    return {
        "object": "request.explanation",
        "id": "chatcmpl-007f3c2a91e84b0d",
        "request_id": "req-0",
        "state": state,
        "priority": "standard",
        "sequences": [sequence],
    }
