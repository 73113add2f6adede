"""Asks a running server for answers in each schema of a folder, and validates them with `jsonschema`.

    python tools/check_schemas.py FOLDER --url http://127.0.0.1:8080 --answers 10

Each file holds a schema, alone or under "schema". Prints how many schemas the server refused, and how many answers
are valid, invalid, and cut by `max_tokens` (which must say so). The exit code is 1 if one is invalid or missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from jsonschema.validators import Draft202012Validator, validator_for


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--schemas", type=int, default=1000, help="at most this many")
    parser.add_argument("--answers", type=int, default=10, help="per schema")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    slots = asyncio.Semaphore(options.at_once)
    began = time.monotonic()
    async with aiohttp.ClientSession(options.url, timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        paths = sorted(options.folder.glob("*.json"))[: options.schemas]

        async def judge_all(path: Path) -> None:
            loaded = json.loads(path.read_text(encoding="utf-8"))
            schema = loaded.get("schema", loaded)
            body = _body(model, schema, options.max_tokens)
            asked = [_ask(session, slots, {**body, "seed": seed}) for seed in range(options.answers)]
            outcomes = [_judge(schema, answer) for answer in await asyncio.gather(*asked)]
            if outcomes[0][0] == "refused":
                counts["schemas refused"] += 1
                print(f"{path.name}: {outcomes[0][1]}")
                return
            counts["schemas accepted"] += 1
            for number, (outcome, detail) in enumerate(outcomes):
                counts[outcome] += 1
                if detail:
                    print(f"{path.name}#{number}: {outcome}: {detail}", flush=True)

        try:
            await asyncio.gather(*(judge_all(path) for path in paths))
        finally:  # Also after Ctrl-C.
            print(f"{dict(counts)} in {time.monotonic() - began:.0f} s", flush=True)
    return 1 if counts["invalid"] or counts["missing"] or counts["refused"] else 0


def _body(model: str, schema: Any, max_tokens: int) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    prompt = "Invent a short example of such a record and write it as JSON."
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "response_format": wanted,
        "max_tokens": max_tokens,
        "temperature": 0.8,
    }


async def _ask(session: aiohttp.ClientSession, slots: asyncio.Semaphore, body: dict[str, Any]) -> Any:
    async with slots, session.post("/v1/chat/completions", json=body) as reply:
        return {**await reply.json(), "status": reply.status}


def _judge(schema: Any, answer: Any) -> tuple[str, str]:
    """The outcome, and what is wrong."""
    if "error" in answer:
        return "refused" if answer["status"] == 400 else "missing", str(answer["error"]["message"])[:200]
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut", ""
    text = choice["message"]["content"]
    validator = validator_for(schema, default=Draft202012Validator)
    try:
        problem = next(validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(json.loads(text)), None)
    except ValueError as error:
        return "invalid", f"{error}: {text[:200]}"
    return ("valid", "") if problem is None else ("invalid", f"{problem.message[:200]}: {text[:200]}")


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
