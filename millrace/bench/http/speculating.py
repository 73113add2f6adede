"""What drafts give: two servers, one with drafts and one without, measured in turns on copy-heavy work and on chat.

Both run at the same time; a round sends the same requests to one and then to the other, in alternating order, so a slow
phase of the machine affects both. Every request has a salt of its own: no round profits from the answers of another.
Rounds are short and many: a point ends when its interval is narrow enough, or when its share of the time is over.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp

from millrace.bench.errors import BenchError
from millrace.bench.http.observing import Ratio
from millrace.bench.http.paired import half_width, paired_ratio
from millrace.bench.http.serving import Progress, await_idle, await_warm, model_name
from millrace.bench.local_server import LocalServer, cpu_seconds

WORKLOADS = ("edit", "quote", "extract", "rewrite", "chat")
COPY_HEAVY = WORKLOADS[:3]
"""A small model copies a settings file, but writes code anew (`rewrite`): there is less to draft."""
STREAMS = (1, 4, 16)
OFF = ("--speculate", "off", "--drafter", "")
"""Options of the server without drafts; the settings of both may name a drafter."""
MAX_TOKENS = 64
"""Of a request. Disturbances of the machine last for seconds, so many short rounds say more than a few long ones."""
SECONDS = 270.0
"""Time for all points."""
NARROW = 0.03
"""Half-width of the interval, as a share of the speed-up, at which a point ends."""
MIN_ROUNDS, MIN_NARROW_ROUNDS, MAX_ROUNDS = 3, 16, 200
"""At least, at least if the interval seems narrow, and at most."""
_FENCE = "```"
_NAMES = ("price", "weight", "height", "volume", "score", "length", "amount", "width")
_PEOPLE = (
    "Anna Keller",
    "Marco Ruiz",
    "Lena Sato",
    "Omar Haddad",
    "Ines Costa",
    "Paul Meyer",
    "Ruth Olsen",
    "Ivo Novak",
)
_QUESTIONS = (
    "What should I see in Rome in two days?",
    "Why is the sky blue?",
    "How do I learn to cook?",
    "Tell me a story about a lighthouse.",
    "What makes a good friend?",
    "How does a bicycle stay upright?",
    "Plan a birthday party for a child.",
    "What is the difference between weather and climate?",
)


def messages_of(workload: str, number: int) -> list[dict[str, str]]:
    """A conversation. In copy-heavy work its last message is the beginning of the answer."""
    name, person = _NAMES[number % len(_NAMES)], _PEOPLE[number % len(_PEOPLE)]
    if workload == "chat":
        return [{"role": "user", "content": _QUESTIONS[number % len(_QUESTIONS)]}]
    if workload == "edit":
        lines = _settings(name, person)
        asked = f"Change the port to 9090 and return the whole file.\n{_FENCE}\n{''.join(lines)}{_FENCE}"
        begun = f"{_FENCE}\n{''.join(lines[:3])}port = 9090\n"
    elif workload == "rewrite":
        code = _code(name)
        asked = f"Rename the function total to add_up and return the whole file.\n```python\n{code}```"
        begun = "Here is the whole file with the function renamed:\n```python\n" + code.splitlines(keepends=True)[0]
    elif workload == "quote":
        text = _report(person, name)
        asked = f"Summarise the text and quote its sentences.\n\n{text}"
        begun = 'The text says: "' + text[:40]
    else:
        text = _report(person, name)
        asked = f'List the sentences of the text as JSON: {{"sentences": [...]}}.\n\n{text}'
        begun = '{"sentences": ["' + text[:40]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": begun}]


def _settings(name: str, person: str) -> list[str]:
    text = (
        f'name = "{name}"\nowner = "{person}"\nhost = "10.0.0.7"\nport = 8080\nworkers = 4\ntimeout_s = 30\n'
        'retries = 3\nlog_level = "info"\nlog_file = "/var/log/app.log"\ncache_dir = "/var/cache/app"\n'
        "max_body_mib = 16\nkeep_alive_s = 75\ncompress = true\n"
    )
    return text.splitlines(keepends=True)


def _code(name: str) -> str:
    return (
        f"from dataclasses import dataclass\n\n\n@dataclass\nclass Item:\n    {name}: float\n    count: int\n\n\n"
        f"def total(items):\n    result = 0.0\n    for item in items:\n        if item.{name} is None:\n"
        f"            continue\n        result += item.{name} * item.count\n    return result\n\n\n"
        f"def average_{name}(items):\n    if not items:\n        return 0.0\n"
        f"    return total(items) / sum(item.count for item in items)\n"
    )


def _report(person: str, name: str) -> str:
    return (
        f"On Monday {person} measured the {name} of forty samples in the old laboratory by the river. The first ten"
        f" were too small to be of use, so {person} asked the workshop for larger ones. On Thursday the workshop"
        f" delivered thirty new samples, each in a wooden box with a printed label. The mean {name} was 12.7,"
        f" with a deviation of 0.8, which is close to what the supplier had promised in spring."
    )


@dataclass(frozen=True, slots=True)
class Side:
    """One server in one round."""

    tokens_per_s: float
    cpu_s: float
    """CPU time of the server per output token, the prompt's included."""


@dataclass(frozen=True, slots=True)
class Point:
    """One workload at one number of streams: a side of each round."""

    workload: str
    streams: int
    off: tuple[Side, ...]
    on: tuple[Side, ...]

    @property
    def speed_up(self) -> Ratio:
        return paired_ratio(*([side.tokens_per_s for side in sides] for sides in (self.on, self.off)))

    @property
    def cpu_ratio(self) -> Ratio:
        """CPU time per token, on over off: what others on the machine take away is not in it."""
        return paired_ratio(*([side.cpu_s for side in sides] for sides in (self.on, self.off)))


@dataclass(frozen=True, slots=True)
class SpeculateBench:
    server_options: tuple[str, ...]
    on_options: tuple[str, ...]
    workloads: tuple[str, ...] = WORKLOADS
    streams: tuple[int, ...] = STREAMS
    rounds: int = 0
    """Of each point; 0: as many as make its interval narrow, within the time."""
    seconds: float = SECONDS

    def run(self, progress: Progress) -> Iterator[Point]:
        with ExitStack() as cleanup:
            servers = [
                self._server(cleanup, (*self.server_options, *options), progress) for options in (OFF, self.on_options)
            ]
            names = [model_name(server) for server in servers]
            points = [(workload, streams) for workload in self.workloads for streams in self.streams]
            end = time.monotonic() + self.seconds
            for number, (workload, streams) in enumerate(points):
                left_s = max(0.0, end - time.monotonic()) / (len(points) - number)
                yield self._point(servers, names, workload, streams, left_s, progress)

    def _point(
        self,
        servers: Sequence[LocalServer],
        names: Sequence[str],
        workload: str,
        streams: int,
        seconds: float,
        progress: Progress,
    ) -> Point:
        sides: tuple[list[Side], list[Side]] = ([], [])
        # To warm up, also what the engine has learnt from other work.
        began, number = time.monotonic(), -3 if streams == 1 else -1
        while not self.is_done(Point(workload, streams, *map(tuple, sides)), time.monotonic() - began, seconds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                progress(f"{workload}, {streams} streams, round {number + 1}")
                bodies = [self._body(names[which], workload, number, stream) for stream in range(streams)]
                side = _measure(servers[which], bodies)
                if number >= 0:
                    sides[which].append(side)
            number += 1
        return Point(workload, streams, tuple(sides[0]), tuple(sides[1]))

    def is_done(self, point: Point, taken_s: float, seconds: float) -> bool:
        num_rounds = len(point.off)
        if self.rounds or num_rounds < MIN_ROUNDS:
            return bool(self.rounds) and num_rounds >= self.rounds
        # One more round must fit.
        is_over = taken_s * (num_rounds + 2) / (num_rounds + 1) > seconds
        return (
            is_over
            or num_rounds >= MAX_ROUNDS
            or (num_rounds >= MIN_NARROW_ROUNDS and half_width(point.speed_up) <= NARROW)
        )

    def _body(self, model: str, workload: str, number: int, stream: int) -> dict[str, Any]:
        messages = messages_of(workload, number * 3 + stream)
        is_begun = messages[-1]["role"] == "assistant"
        return {
            "model": model,
            "messages": messages,
            "add_generation_prompt": not is_begun,
            "continue_final_message": is_begun,
            "temperature": 0.7 if workload == "chat" else 0.0,
            "seed": 100 * number + stream,
            "max_tokens": MAX_TOKENS,
            "stop": [_FENCE] if workload == "edit" else [],  # the end of the file
            "cache_salt": f"{workload} {number} {stream}",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _server(self, cleanup: ExitStack, options: tuple[str, ...], progress: Progress) -> LocalServer:
        progress("starting the servers")
        server = cleanup.enter_context(LocalServer(options))
        asyncio.run(server.wait_ready())
        await_warm(server)
        return server


def _measure(server: LocalServer, bodies: Sequence[dict[str, Any]]) -> Side:
    cpu_before = cpu_seconds(server.pid)
    rate, tokens = asyncio.run(_decode_rate(server.url, bodies))
    await_idle(server)
    return Side(rate, max(cpu_seconds(server.pid) - cpu_before, 1e-3) / tokens)


async def _decode_rate(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, int]:
    """Output tokens per second, all streams together, from the first token of the first to the end of the last; and the
    tokens."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        found = await asyncio.gather(*(_stream(session, url, body) for body in bodies))
    begun, ended = min(first for first, _, _ in found), max(last for _, last, _ in found)
    num_tokens = sum(tokens for _, _, tokens in found)
    return (num_tokens - len(found)) / max(ended - begun, 1e-6), num_tokens


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, float, int]:
    """When its first and its last piece came, and its tokens."""
    first, tokens = 0.0, 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise BenchError(f"The server answered {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            elif not first and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first = time.monotonic()
    last = time.monotonic()
    return first or last, last, max(tokens, 1)


_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#ff7f0e")


def plot_svg(points: Sequence[Point]) -> str:
    """Speed-up against the number of streams, a line for each workload, with the intervals."""
    streams = sorted({point.streams for point in points})
    top = max([2.0, *(min(point.speed_up.high, 2 * point.speed_up.value) for point in points)]) * 1.05
    left, bottom, width, height = 60, 300, 420, 270

    def place(point_streams: int, value: float) -> tuple[float, float]:
        across = streams.index(point_streams) / max(1, len(streams) - 1)
        return left + across * width, bottom - value / top * height

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="350" font-family="sans-serif" font-size="12">',
        '<rect width="640" height="350" fill="white"/>',
        f'<text x="{left}" y="20">Speed-up of decoding with drafts</text>',
        f'<text x="{left + width / 2}" y="340" text-anchor="middle">streams</text>',
    ]
    for value in range(int(top) + 1):
        y = place(streams[0], value)[1]
        stroke = "#888" if value == 1 else "#ddd"
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{stroke}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value} ×</text>')
    parts += [f'<text x="{place(one, 0)[0]:.1f}" y="318" text-anchor="middle">{one}</text>' for one in streams]
    for number, workload in enumerate(dict.fromkeys(point.workload for point in points)):
        colour, own = _COLOURS[number % len(_COLOURS)], [point for point in points if point.workload == workload]
        spots = [place(point.streams, point.speed_up.value) for point in own]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point, (x, y) in zip(own, spots, strict=True):
            low, high = (
                place(point.streams, min(max(one, 0), top))[1] for one in (point.speed_up.low, point.speed_up.high)
            )
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{left + width + 20}" y="{60 + 20 * number}" fill="{colour}">{workload}</text>')
    return "\n".join([*parts, "</svg>", ""])
