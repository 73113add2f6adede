"""A chat stream beside many texts that another model of the same server embeds: gaps of the stream with and without.

One server has both models. One stream after another draws tokens until all texts have their vectors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.http.prompts import TextPrompts
from millrace.bench.http.target import Target
from millrace.bench.http.workloads import RequestShape
from millrace.bench.local_server import LocalServer

TEXTS_PER_REQUEST, NUM_CLIENTS = 100, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128
"""Of each stream."""


@dataclass(frozen=True, slots=True)
class EncodeBesideBench:
    generator: str
    embedder: str
    texts: Sequence[str]
    target_ms: float
    """Of a step with decoding requests (`--step-ms`)."""
    server_options: tuple[str, ...] = ()
    seed: int = 0

    async def run(self) -> list[Figure]:
        with LocalServer([self.generator, self.embedder, *self.server_options]) as server:
            await server.wait_ready()
            # Both models are loaded before anything counts.
            async with Target(server.url, self.generator) as target, aiohttp.ClientSession() as session:
                await self.embed(session, server.url, self.texts[:8])
                await target.probe(self.seed)
                alone = [gap for number in range(3) for gap in await self._gaps(target, number)]
                began = time.monotonic()
                embedding = asyncio.create_task(self.embed_all(session, server.url))
                beside: list[float] = []
                try:
                    while not embedding.done():
                        beside += await self._gaps(target, len(beside))
                finally:
                    embedding.cancel()
                ended = await embedding
        return self.figures(alone, beside, ended - began)

    async def _gaps(self, target: Target, index: int) -> list[float]:
        """Milliseconds between the texts of one stream. Streams differ by `index`."""
        at: list[float] = []
        prompt = TextPrompts(self.seed, 1.0).make(RequestShape("beside", index, 0, PROMPT_TOKENS, OUTPUT_TOKENS))
        sample = await target.complete(prompt, OUTPUT_TOKENS, at.append)
        if sample.error:
            raise BenchError(f"The stream of {self.generator} failed: {sample.error}")
        return [1e3 * (after - before) for before, after in zip(at, at[1:], strict=False)]

    async def embed_all(self, session: aiohttp.ClientSession, url: str) -> float:
        """When all texts had their vectors."""
        parts = [
            self.texts[first : first + TEXTS_PER_REQUEST] for first in range(0, len(self.texts), TEXTS_PER_REQUEST)
        ]
        waiting = iter(parts)

        async def client() -> None:
            for part in waiting:
                await self.embed(session, url, part)

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        return time.monotonic()

    async def embed(self, session: aiohttp.ClientSession, url: str, texts: Sequence[str]) -> None:
        body = {"model": self.embedder, "input": list(texts)}
        async with session.post(f"{url}/v1/embeddings", json=body, timeout=aiohttp.ClientTimeout(600)) as answer:
            found = await answer.json()
            if answer.status != 200:
                raise BenchError(f"{self.embedder} gave no vectors: HTTP {answer.status}, {str(found)[:300]}")

    def figures(self, alone: list[float], beside: list[float], seconds: float) -> list[Figure]:
        figures = []
        for workload, gaps in (("stream alone", alone), (f"stream beside {len(self.texts)} texts", beside)):
            for metric, value in (("p50", percentile(gaps, 50)), ("p99", percentile(gaps, 99)), ("longest", max(gaps))):
                figures.append(Figure(workload, f"gap {metric}", value, "ms", len(gaps)))
            late = 100.0 * sum(gap > self.target_ms for gap in gaps) / len(gaps)
            figures.append(Figure(workload, f"gaps over {self.target_ms:g} ms", late, "%", len(gaps)))
        figures.append(
            Figure("embedding beside it", "texts_per_s", len(self.texts) / seconds, "texts/s", len(self.texts))
        )
        return figures


def verdict(figures: Sequence[Figure], target_ms: float) -> str:
    p99 = next(one.value for one in figures if one.workload.startswith("stream beside") and one.metric == "gap p99")
    says = "within" if p99 <= target_ms else "ABOVE"
    return (
        f"99 of 100 gaps of the stream beside the texts took up to {p99:.0f} ms: {says} the target of {target_ms:g} ms."
    )
