"""Fuzzing with mutated valid requests: the server may refuse them, but must not answer 5xx, hang or leak."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.faults.leak_check import IdleReadings, readings_around
from millrace.faults.wire import Address, exchange, post_bytes

ANSWER_LIMIT_S = 60.0
MAX_TOKENS = 4
NUM_WORKERS = 8
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**40),
    *("", "0", "x" * 3000, "\x00", "\ud83d\ude00"),
    *("\u2028", "é" * 50, [], [[]], [None], {}, {"a": {"b": [1]}}, [1, "a"], "interactive", ["\n"]),
)


@dataclass(slots=True)
class FuzzResult:
    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """The first few requests that got a 5xx, a malformed answer or none, shortened."""
    readings: IdleReadings | None = None


def seeds(model: str) -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    common: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0.5, "seed": 3}
    return [
        ("/v1/chat/completions", {**common, "messages": messages}),
        ("/v1/chat/completions", {**common, "messages": messages, "stream": True, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {**common, "messages": messages, "n": 2, "stop": ["."], "logit_bias": {"50": 1}}),
        ("/v1/completions", {**common, "prompt": "The sea is", "echo": True, "logprobs": 1}),
        (
            "/v1/completions",
            {**common, "prompt": ["One", "Two"], "stream": True, "stream_options": {"include_usage": True}},
        ),
        ("/v1/completions", {**common, "prompt": [504, 3217, 314], "top_k": 5, "min_p": 0.1, "priority": "batch"}),
        ("/tokenize", {"prompt": "The sea is"}),
        ("/detokenize", {"tokens": [504, 3217, 314]}),
    ]


async def fuzz(url: str, pid: int, seconds: float, seed: int = 0) -> FuzzResult:
    address, result = Address.of(url), FuzzResult()
    for path, body in seeds(address.model):
        status, answer = await exchange(address, post_bytes(path, json.dumps(body).encode()), ANSWER_LIMIT_S)
        if status != 200:
            result.faults.append(f"the unchanged request to {path} got {status}: {answer[:200]!r}")
    seeds_left = itertools.count(seed * 1_000_003)

    async def work(part_s: float, is_counted: bool) -> None:
        end, counted = time.monotonic() + part_s, result if is_counted else FuzzResult(faults=result.faults)
        workers = (_worker(address, random.Random(next(seeds_left)), end, counted) for _ in range(NUM_WORKERS))
        await asyncio.gather(*workers)

    result.readings = await readings_around(url, pid, seconds, work)
    return result


async def _worker(address: Address, rng: random.Random, end: float, result: FuzzResult) -> None:
    while time.monotonic() < end:
        data = mutated(rng, address.model)
        result.sent += 1
        try:
            status, body = await exchange(address, data, ANSWER_LIMIT_S)
        except TimeoutError:
            _fault(result, "no answer", data)
            continue
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            _fault(result, f"a broken answer ({error!r})", data)
            continue
        result.statuses[status] += 1
        if status >= 500:
            _fault(result, f"status {status}: {body[:200]!r}", data)
        elif status >= 400 and not _is_error_body(body):
            _fault(result, f"status {status} without an error body: {body[:200]!r}", data)


def _is_error_body(body: bytes) -> bool:
    try:
        return set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return False


def _fault(result: FuzzResult, what: str, data: bytes) -> None:
    if len(result.faults) < 20:
        result.faults.append(f"{what} to {data[:600]!r}")


# ── mutations ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def mutated(rng: random.Random, model: str) -> bytes:
    path, body = rng.choice(seeds(model))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = _mutate(rng, body)
    data = json.dumps(body).encode("utf-8", "replace")
    if rng.random() < 0.25:
        data = rng.choice(_BYTE_MUTATIONS)(rng, data)
    headers = {}
    if rng.random() < 0.1:
        name = rng.choice(("Content-Type", "X-Request-Id", "X-Request-Timeout", "Authorization", "Expect", "Accept"))
        headers[name] = rng.choice(
            ("", "x", "application/xml", "a" * 500, "1e9", "30", "Bearer x", "text/event-stream")
        )
    return post_bytes(
        path, data, headers, method="POST" if rng.random() < 0.97 else rng.choice(("GET", "PUT", "DELETE"))
    )


def _mutate(rng: random.Random, value: Any) -> Any:
    """Change one place in the tree. Changes that would only lengthen the generation are avoided."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if key in ("max_tokens", "model") and rng.random() < 0.7:
            return value
        changed = dict(value)
        action = rng.random()
        if action < 0.15 and key != "max_tokens":
            del changed[key]
        elif action < 0.3:
            changed[rng.choice(("unknown", "Stream", "tools", "user", key.upper()))] = rng.choice(_ODD)
        elif action < 0.6 and key != "max_tokens":
            changed[key] = rng.choice(_ODD)
        else:
            changed[key] = _mutate(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        changed_list = list(value)
        place = rng.randrange(len(value))
        changed_list[place] = _mutate(rng, value[place])
        return changed_list * rng.choice((1, 1, 2, 0))
    if isinstance(value, str) and rng.random() < 0.5:
        place = rng.randrange(len(value) + 1)
        return (
            value[:place] + rng.choice(("\u0000", "\ud83d\ude00", "<|im_end|>", "\\", '"', "{{", "  ")) + value[place:]
        )
    return rng.choice(_ODD)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    return data + data[rng.randrange(len(data)) :]


def _nest(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice((10, 2000))
    return b"[" * depth + data + b"]" * depth


_BYTE_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (_cut, _flip, _repeat, _nest)
