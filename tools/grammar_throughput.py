"""Tokens per second with and without a schema, in alternating rounds: `python tools/grammar_throughput.py --rounds 6`.

Each round sends the same prompts with the same sampling to a running server, once free and once constrained, in
changing order. `--share 0.5` constrains half of the streams and compares the others with those of a free round.
Answers have exactly `--tokens` tokens: the schema needs more than that, and free answers ignore the end token.
`--schemas DIRECTORY` takes the streams' schemas in turn from its files, each a schema or an object with a `schema`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["small", "medium", "large"]},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "kind", "price", "tags", "is_new"],
    "additionalProperties": False,
}
MIN_ITEMS = 400
T_975 = {2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20, 15: 2.13, 20: 2.09}


def item_schemas(directory: str) -> list[Any]:
    """Those that can stand inside an array: a reference would lose its root."""
    found = []
    for path in sorted(Path(directory).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content.get("schema", content)
        if "$ref" not in json.dumps(schema):
            found.append(schema)
    return found or [RECORD]


async def answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        found = await reply.json()
        if reply.status != 200:
            raise SystemExit(f"The server answered {reply.status}: {found}")
        return int(found["usage"]["completion_tokens"])


async def round_of(url: str, args: argparse.Namespace, seed: int, num_constrained: int) -> tuple[float, float]:
    """Tokens per second of all streams, and of those beyond `--share`, each by its own time."""
    started = time.perf_counter()

    async def one(session: aiohttp.ClientSession, number: int) -> tuple[int, float]:
        asked = f"Invent record {seed * 1000 + number} of a shop, as JSON."
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": asked}],
            "max_tokens": args.tokens,
            "seed": seed,
            "temperature": 0.8,
            "top_p": 0.95,
        }
        if number < num_constrained:
            items = args.items[number % len(args.items)]
            body["structured_outputs"] = {"json": {"type": "array", "items": items, "minItems": MIN_ITEMS}}
        else:
            body["ignore_eos"] = True
        num_tokens = await answer(session, url, body)
        return num_tokens, time.perf_counter() - started

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        ended = await asyncio.gather(*(one(session, number) for number in range(args.streams)))
    took = time.perf_counter() - started
    others = ended[int(args.streams * args.share) :] if args.share < 1 else ended
    own = sum(tokens for tokens, _ in others) / max(seconds for _, seconds in others)
    return sum(tokens for tokens, _ in ended) / took, own


def mask_seconds(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("millrace_engine_grammar_mask_seconds_total")
    )


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the ratios, with its 95% interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, freedom = statistics.fmean(logs), len(logs) - 1
    factor = T_975[max(known for known in T_975 if known <= max(freedom, 2))]
    half = factor * statistics.stdev(logs) / math.sqrt(len(logs)) if freedom else 0.0
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of a free and a constrained round")
    parser.add_argument("--share", type=float, default=1.0, help="of the streams that are constrained")
    parser.add_argument("--schemas", metavar="DIRECTORY", help="of schemas, instead of the built-in one")
    args = parser.parse_args()
    args.items = item_schemas(args.schemas) if args.schemas else [RECORD]
    constrained = int(args.streams * args.share)
    for num_constrained in (0, constrained):
        await round_of(args.url, args, 0, num_constrained)  # Warm: the schema is compiled once.
    ratios, before = [], mask_seconds(args.url)
    for seed in range(1, args.rounds + 1):
        found: dict[int, float] = {}
        for num_constrained in (0, constrained) if seed % 2 else (constrained, 0):
            whole, others = await round_of(args.url, args, seed, num_constrained)
            found[num_constrained] = whole if args.share >= 1 else others
        ratios.append(found[constrained] / found[0])
        print(
            f"round {seed}: free {found[0]:.1f} tok/s, constrained {found[constrained]:.1f}: {ratios[-1]:.3f}",
            flush=True,
        )
    middle, low, high = interval(ratios)
    masks = (mask_seconds(args.url) - before) / (args.rounds * constrained * args.tokens)
    print(
        json.dumps(
            {
                "streams": args.streams,
                "share": args.share,
                "ratio": round(middle, 4),
                "low": round(low, 4),
                "high": round(high, 4),
                "median": round(statistics.median(ratios), 4),
                "mask_us_per_token": round(masks * 1e6, 1),
            }
        )
    )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except aiohttp.ClientConnectorError as error:
        raise SystemExit(f"{error}. Start a server, `millrace serve`, or name its address: --url URL") from None
