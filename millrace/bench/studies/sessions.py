"""Sessions and kept documents on a server whose device holds only a part of them, against computing them again."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from millrace.bench.local_server import LocalServer
from millrace.bench.studies.measured import Asked, MeasuredStudy, ratio_of_medians
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings

SESSION_TOKENS, DOCUMENT_TOKENS, BLOCK = 2048, 512, 16
POOL_SHARE = 6
"""The sessions together have so many times the tokens of the pool on the device."""
MIN_POOL = 8192
HOST_GIB = 6.0
AT_ONCE = 3
"""Turns that are asked together, and never more: each is answered before three others begin."""
SMALL_POOL, SMALL_HOST_GIB, DISK_GIB = 8192, 0.375, 16.0
"""With a disk. 0.375 GiB hold about 17,000 tokens of the default model in float16; a return may take half of it."""
ANSWER_LIMIT_S = 300.0
WORDS = "river boat stone paper light wind glass sugar clock iron salt copper bread lamp rope chair".split()


class Server:
    """Asks a server and measures how long it takes."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[float, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
            return time.perf_counter() - began, json.load(answer)


def sessions(asked: Asked) -> Findings:
    return _served(asked, max(MIN_POOL, asked.samples * SESSION_TOKENS // POOL_SHARE), HOST_GIB, 0.0)


def sessions_on_disk(asked: Asked) -> Findings:
    return _served(asked, SMALL_POOL, SMALL_HOST_GIB, DISK_GIB)


def _served(asked: Asked, pool: int, host_gib: float, disk_gib: float) -> Findings:
    with TemporaryDirectory() as directory:
        options = [*("--kv-tokens", str(pool), "--kv-host-gib", str(host_gib), "--kv-retained", "0.9")]
        options += ["--data-dir", str(Path(directory) / "data"), "--block-size", str(BLOCK)]
        options += ["--kv-disk", directory, "--kv-disk-gib", str(disk_gib)] if disk_gib else []
        with LocalServer([asked.model, *options]) as started:
            asyncio.run(started.wait_ready())
            return measure(Server(started.url), asked, pool)


def measure(server: Server, asked: Asked, pool: int) -> Findings:
    first, later, again, hits = _turns(server, asked)
    most, recomputed = max(hit["computed_tokens"] for hit in hits), sum(hit["recomputed_tokens"] for hit in hits)
    cold, warm, ratios = _documents(server, asked)
    ratio = ratio_of_medians(later, again)
    rows = [
        ("a session's first turn", median(first), max(first), "–"),
        ("its second turn, computed again", median(again), max(again), 1.0),
        ("its second turn, as a session", median(later), max(later), ratio),
        (f"a document of {DOCUMENT_TOKENS} tokens, cold", median(cold), max(cold), 1.0),
        ("the same, kept", median(warm), max(warm), ratios),
    ]
    lines = [Line("computed again", range(len(again)), again), Line("as a session", range(len(later)), later)]
    loaded, computed = sum(hit["loaded_tokens"] for hit in hits), sum(hit["computed_tokens"] for hit in hits)
    total = sum(hit["prompt_tokens"] for hit in hits)
    return Findings(
        ("what", "first token, median s", "slowest s", "share of computing"),
        rows,
        [plot("Seconds until the first token of a second turn", lines, "session", "s")],
        f"{asked.samples} sessions of {SESSION_TOKENS} tokens on a device with room for {pool}, {AT_ONCE} turns at a"
        f" time: a turn's first token takes {ratio:.2f} of the time that computing the conversation takes. Of the"
        f" prompts' {total:,} tokens {loaded:,} came back from a lower tier and {computed:,} were computed, at most"
        f" {most:,} in a turn; {recomputed:,} of them had been computed before. A kept document of {DOCUMENT_TOKENS}"
        f" tokens takes {ratios:.2f} of a cold one.",
    )


def _turns(server: Server, asked: Asked) -> tuple[list[float], list[float], list[float], list[Any]]:
    """Seconds of first turns, of second turns, of computing the latter again, and what the second turns found. Each few
    second turns that are asked at once alternate with computing the same conversations again, at once too."""
    names = [str(server.ask("/v1/sessions", {"ttl_s": 7200})[1]["id"]) for _ in range(asked.samples)]

    def first_turn(number: int) -> float:
        return server.ask(_turns_of(names[number]), _body(_text(number, SESSION_TOKENS)))[0]

    def later_turn(number: int) -> float:
        return server.ask(_turns_of(names[number]), _body(f"And {number}?"))[0]

    def computed_again(number: int) -> float:
        whole = _body(_text(number, SESSION_TOKENS) + f" And {number}?")
        return server.ask("/v1/chat/completions", {**whole, "cache_salt": names[number]})[0]

    first: list[float] = []
    later: list[float] = []
    again: list[float] = []
    with ThreadPoolExecutor(AT_ONCE) as clients:
        groups = [range(asked.samples)[at : at + AT_ONCE] for at in range(0, asked.samples, AT_ONCE)]
        for group in groups:
            first += clients.map(first_turn, group)
        for group in groups:
            later += clients.map(later_turn, group)
            again += clients.map(computed_again, group)
    hits = [server.ask(f"/v1/sessions/{name}")[1]["last_turn"] for name in names]
    for name in names:
        server.ask(f"/v1/sessions/{name}", method="DELETE")
    return first, later, again, hits


def _turns_of(name: str) -> str:
    return f"/v1/sessions/{name}/turns"


def _documents(server: Server, asked: Asked) -> tuple[list[float], list[float], float]:
    texts = [_text(number, DOCUMENT_TOKENS, "Document") for number in range(2 * asked.samples)]
    cold = []
    for number, text in enumerate(texts):
        cold.append(server.ask("/v1/cache", {"prompt": text, "name": f"document-{number}", "ttl_s": 7200})[0])
    warm = [server.ask("/v1/completions", {"prompt": f"{text} So", "max_tokens": 1})[0] for text in texts]
    return cold, warm, ratio_of_medians(warm, cold)


def _text(number: int, tokens: int, title: str = "Report") -> str:
    """About so many tokens: a word is one."""
    words = [WORDS[(number * 7 + at * (number + 3) + at * at) % len(WORDS)] for at in range(tokens - 40)]
    return f"{title} {number}. " + " ".join(words)


def _body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}


STUDIES = {
    "sessions": MeasuredStudy(
        "Sessions beyond the device",
        "What does a turn of a session cost whose keys and values had to leave the device?",
        "A server whose KV pool holds a sixth of all sessions, but at least 8,192 tokens, and host memory for the"
        f" rest. `--samples` sessions get a first turn of 2,048 tokens each, {AT_ONCE} at a time, then, in the same"
        f" order, {AT_ONCE} at a time too, a short second one; after each few the same conversations are computed"
        " again, at once, under a salt of their own. Then twice as many documents of 512 tokens are kept (`/v1/cache`)"
        " and asked about, one by one. One token per answer: the time of a request is that of its first token.",
        "smollm2-135m-instruct",
        100,
        sessions,
    ),
    "sessions-on-disk": MeasuredStudy(
        "Sessions on a disk",
        "What does a turn of a session cost whose keys and values are on a disk?",
        "As the study `sessions`, but with a pool of 8,192 tokens, 0.375 GiB of host memory, and a disk for the rest.",
        "smollm2-135m-instruct",
        100,
        sessions_on_disk,
    ),
}
