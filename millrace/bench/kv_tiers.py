"""`millrace bench kv-tiers`: a working set of four pools, without lower tiers, with host memory, and with a disk too.

Three servers of one model answer the same prompts in turns. First each prompt once, then prompts drawn at random: what
these find by location, and how long their first tokens take.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from millrace.bench.figures import Figure, percentile
from millrace.bench.local_server import LocalServer
from millrace.bench.metrics_page import scrape
from millrace.bench.studies.sessions import Server
from millrace.load.svg import Line, plot, svg_file

POOL_TOKENS, HOST_GIB, DISK_GIB = 2048, 0.05, 1.0
"""By default. 0.05 GiB hold about 2,300 tokens of the default model in float16."""
WORKING_SET, PROMPT_TOKENS = 4, 256
"""Pools, and tokens of a prompt."""
FIRST_ID, NUM_IDS = 300, 700
"""Every vocabulary has these token ids."""
LOCATIONS = ("device", "host", "disk")
_FOUND = "millrace_engine_prefix_tokens_total"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class KvTiersBench:
    """`settings`: options of all servers, the model among them."""

    settings: tuple[str, ...]
    num_requests: int
    pool_tokens: int = POOL_TOKENS
    host_gib: float = HOST_GIB
    disk_gib: float = DISK_GIB
    prompt_tokens: int = PROMPT_TOKENS
    seed: int = 0

    def run(self, on_progress: Progress, svg: Path | None = None) -> Iterator[Figure]:
        with TemporaryDirectory() as directory, ExitStack() as stack:
            host = ("--kv-host-gib", str(self.host_gib))
            disk = ("--kv-disk", directory, "--kv-disk-gib", str(self.disk_gib))
            modes = {"off": ("--kv-host-gib", "0"), "host": host, "host and disk": (*host, *disk)}
            served = [self._start(stack, name, options) for name, options in modes.items()]
            self._ask_all(served, on_progress)
        for one in served:
            yield from one.figures()
        if svg is not None:
            lines = [Line(one.name, range(len(one.seconds)), sorted(one.seconds)) for one in served]
            drawn = plot("Time to first token", lines, "requests, the fastest first", "s")
            svg.write_text(svg_file(drawn), encoding="utf-8")

    def _start(self, stack: ExitStack, name: str, options: Sequence[str]) -> _Served:
        sizes = ("--kv-tokens", str(self.pool_tokens), "--max-running", "4")
        started = stack.enter_context(LocalServer([*self.settings, *sizes, *options]))
        asyncio.run(started.wait_ready())
        return _Served(name, started.url)

    def _ask_all(self, served: Sequence[_Served], on_progress: Progress) -> None:
        rng = random.Random(self.seed)
        count = WORKING_SET * self.pool_tokens // self.prompt_tokens
        prompts = [[FIRST_ID + rng.randrange(NUM_IDS) for _ in range(self.prompt_tokens)] for _ in range(count)]
        for number, prompt in enumerate(prompts):
            on_progress("each prompt once", number, count)
            for one in served:
                one.ask(prompt)
        for one in served:
            one.begin()
        for number in range(self.num_requests):
            on_progress("prompts again", number, self.num_requests)
            prompt = rng.choice(prompts)
            for one in served:
                one.seconds.append(one.ask(prompt))
        for one in served:
            one.end()


@dataclass(slots=True)
class _Served:
    name: str
    url: str
    seconds: list[float] = field(default_factory=list)
    found: dict[str, float] = field(default_factory=dict)
    """Tokens by location."""

    def ask(self, prompt: list[int]) -> float:
        """Seconds until the first token, which is the last one, too."""
        return Server(self.url).ask("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})[0]

    def begin(self) -> None:
        self.found = {location: -tokens for location, tokens in self._counted().items()}

    def end(self) -> None:
        for location, tokens in self._counted().items():
            self.found[location] += tokens

    def _counted(self) -> dict[str, float]:
        page = scrape(self.url)
        return {
            place: sum(value for key, value in page.items() if key.startswith(_FOUND) and f'tier="{place}"' in key)
            for place in (*LOCATIONS, "none")
        }

    def figures(self) -> Iterator[Figure]:
        total = sum(self.found.values()) or 1.0
        for place in LOCATIONS:
            yield Figure(self.name, f"found: {place}", 100 * self.found[place] / total, "%")
        for percent in (50, 99):
            value = 1000 * percentile(self.seconds, percent)
            yield Figure(self.name, f"TTFT p{percent}", value, "ms", requests=len(self.seconds))
