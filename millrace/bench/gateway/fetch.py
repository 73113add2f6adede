"""A prompt that another replica has: fetched from there, and computed, in turns on two replicas of one model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.bench.local_server import LocalServer
from millrace.serve.fetching.wire import FETCH_HEADER, FROM_HEADER
from millrace.serve.tenancy.trust import GATEWAY_KEY_HEADER

_KEY = "of this benchmark"
_MODEL = "both"


async def fetch_figures(options: Sequence[str], num_tokens: int, rounds: int) -> list[Figure]:
    """`options`: of both servers. Each round has two prompts of its own: one is fetched, one computed."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(LocalServer([*options, "--served-name", _MODEL, "--gateway-key", _KEY]))
            for _ in range(2)
        ]
        for server in servers:
            await server.wait_ready()
        holder, asker = (server.url for server in servers)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300.0)) as session:
            await _seconds(session, asker, _prompt(0, num_tokens), "")  # Steps are measured from now on.
            fetched: list[float] = []
            computed: list[float] = []
            outcomes: Counter[str] = Counter()
            for number in range(1, rounds + 1):
                prompts = _prompt(2 * number, num_tokens), _prompt(2 * number + 1, num_tokens)
                for prompt in prompts:
                    await _seconds(session, holder, prompt, "")
                took, said = await _seconds(session, asker, prompts[0], holder)
                outcomes[_without_figures(said)] += 1
                fetched.append(took)
                computed.append((await _seconds(session, asker, prompts[1], ""))[0])
    name, note = f"{num_tokens} tokens", ", ".join(f"{count} × {what}" for what, count in outcomes.items())
    ratios = [slow / fast for slow, fast in zip(computed, fetched, strict=True)]
    return [
        Figure(name, "first token, prompt fetched", median(fetched) * 1e3, "ms", rounds, note),
        Figure(name, "first token, prompt computed", median(computed) * 1e3, "ms", rounds),
        Figure(name, "computed over fetched", median(ratios), "×", rounds),
    ]


def _without_figures(said: str) -> str:
    """`fetched through shared memory`, or why not."""
    outcome, _, rest = said.partition(": ")
    if not outcome.startswith("fetched"):
        return said or "nothing said"
    return outcome + rest.partition(" s")[2].partition(";")[0]


def _prompt(number: int, num_tokens: int) -> list[int]:
    return [300 + (number * 7919 + 31 * place + place * place % 13) % 3000 for place in range(num_tokens)]


async def _seconds(session: aiohttp.ClientSession, url: str, prompt: list[int], source: str) -> tuple[float, str]:
    """Time of a request for one token, and what its replica says of the fetch."""
    headers = {GATEWAY_KEY_HEADER: _KEY, **({FROM_HEADER: source} if source else {})}
    began = time.perf_counter()
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        whole = await answer.read()
        if answer.status != 200:
            raise BenchError(f"{url} answered {answer.status}: {whole[:300].decode(errors='replace')}")
        return time.perf_counter() - began, answer.headers.get(FETCH_HEADER, "")


def run(options: Sequence[str], num_tokens: int, rounds: int) -> list[Figure]:
    return asyncio.run(fetch_figures(options, num_tokens, rounds))
