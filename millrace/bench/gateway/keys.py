"""What API keys and quotas cost at a gateway: the same load with and without them, in turns, over the same replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.bench.gateway.null_replica import MODEL
from millrace.bench.gateway.run import WARM_UP_S, GatewayBench, cpu_s, everything_but
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

MIN_SHARE = 0.95
"""Bar: tokens per second with keys and quotas over those without."""
NUM_TENANTS = 1000
"""In the keys file; all streams are of one of them."""
OWN, SHARED = "keys and quotas", "keys and quotas in a shared SQLite store"
NO_KEYS = "no keys"
_KEY = "the key of this benchmark"
_FIRST_TOKENS, _UNCOUNTED = 30, 5
"""First tokens of each turn and gateway, one at a time; the first ones open connections."""


@dataclass
class _Variant:
    url: str
    pids: list[int]
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """Of the gateways, per token."""
    first_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class KeysBench:
    bench: GatewayBench
    rounds: int = 4

    async def run(self) -> list[Figure]:
        async with AsyncExitStack() as stack:
            stack.enter_context(everything_but(self.bench.cores))
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="millrace-keys-")))
            variants = await self._start(stack, folder)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {_KEY}"})
            )
            names = list(variants)
            await _first_tokens(session, list(variants.values()), _UNCOUNTED)
            for one in variants.values():
                one.first_ms.clear()
            for number in range(self.rounds):
                await _first_tokens(session, list(variants.values()), _FIRST_TOKENS)
                for name in names if number % 2 == 0 else names[::-1]:
                    await self._load(variants[name])
        return self._figures(variants)

    async def _start(self, stack: AsyncExitStack, folder: Path) -> dict[str, _Variant]:
        file = folder / "keys.toml"
        file.write_text(keys_file([_KEY, *(f"key {number}" for number in range(1, NUM_TENANTS))]), encoding="utf-8")
        keys = ("--keys-file", str(file))
        options = {NO_KEYS: (), OWN: keys, SHARED: (*keys, "--limits-store", f"sqlite:{folder / 'limits.db'}")}
        urls = await self.bench.replicas(stack)
        return {name: _Variant(*(await self.bench.gateways(stack, urls, *more))) for name, more in options.items()}

    async def _load(self, variant: _Variant) -> None:
        with ExitStack() as cleanup:
            clients = await asyncio.to_thread(self.bench.clients, cleanup, variant.url, _KEY)
            begin, end = clients.begin(warm_up_s=WARM_UP_S, seconds=self.bench.seconds)
            await asyncio.sleep(begin - time.monotonic())
            before = sum(map(cpu_s, variant.pids))
            await asyncio.sleep(max(0.0, end - time.monotonic()))
            used_s = sum(map(cpu_s, variant.pids)) - before
            tally = await asyncio.to_thread(clients.results)
        if tally.errors:
            raise BenchError(f"{tally.errors} streams failed, first: {tally.first_error}")
        variant.tokens_per_s.append(tally.frames / self.bench.seconds)
        variant.cpu_us.append(used_s / max(1, tally.frames) * 1e6)

    def _figures(self, variants: dict[str, _Variant]) -> list[Figure]:
        found, base = [], variants[NO_KEYS]
        for name, one in variants.items():
            label = f"{name}, {self.bench.num_streams} streams of {self.bench.num_tokens} tokens"
            found += [
                Figure(label, "tokens/s", median(one.tokens_per_s), "1/s", self.rounds),
                Figure(label, "CPU of the gateway per token", median(one.cpu_us), "µs", self.rounds),
                Figure(label, "first token, one at a time", median(one.first_ms), "ms", len(one.first_ms)),
            ]
            if one is not base:
                found += _against(label, one, base)
        return found


def _against(label: str, one: _Variant, base: _Variant) -> list[Figure]:
    """Medians of the ratios and differences of turns that follow each other."""
    share = _ratio(one.tokens_per_s, base.tokens_per_s)
    note = f"{'held' if share >= MIN_SHARE else 'missed'}: at least {MIN_SHARE}"
    added = median(mine - other for mine, other in zip(one.first_ms, base.first_ms, strict=True))
    return [
        Figure(label, "tokens/s, share of those without keys", share, "×", len(one.tokens_per_s), note),
        Figure(label, "CPU per token against no keys", _ratio(one.cpu_us, base.cpu_us), "×", len(one.cpu_us)),
        Figure(label, "added to the first token p50", added, "ms", len(one.first_ms)),
    ]


def _ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    return median(one / other if other else float("nan") for one, other in zip(mine, base, strict=True))


def keys_file(keys: Sequence[str]) -> str:
    """A tenant per key, with limits that nothing reaches."""
    return "".join(
        f'[tenants.tenant-{number}]\nkeys = ["{DIGEST_PREFIX}{digest_of(key).hex()}"]\n'
        "max_concurrent = 1000000\ntokens_per_minute = 1000000000000\n"
        for number, key in enumerate(keys)
    )


async def _first_tokens(session: aiohttp.ClientSession, variants: Sequence[_Variant], count: int) -> None:
    """In turns."""
    for number in range(count):
        for one in variants:
            began = time.perf_counter()
            body = {"model": MODEL, "prompt": f"first {number}", "stream": True, "max_tokens": 1}
            async with session.post(f"{one.url}/v1/completions", json=body) as answer:
                await answer.content.readline()
                one.first_ms.append(1e3 * (time.perf_counter() - began))
                if answer.status != 200:
                    raise BenchError(f"{one.url} answered {answer.status}.")
                await answer.read()
