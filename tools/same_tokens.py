"""Holds proofs over HTTP, with float32 on a CPU: drafts, the host tier and ranks change no token.

    python tools/same_tokens.py drafts [--prompts 200] [--max-tokens 16] [--speculate ngram]
    python tools/same_tokens.py host-tier [--prompts 24]
    python tools/same_tokens.py ranks [--prompts 200] [--model qwen2.5-coder-1.5b] [--ranks 2,3] [--minutes 10]

`drafts`: the same prompts to a server without drafts and to one with them, at 1, 4 and 16 at once; every answer must
have the same token ids. A quarter of the prompts have a JSON schema. `host-tier`: prompts that fill the KV pool three
times over are sent twice, to a server with a host tier and to one without; the repeats must have the same token ids,
and the time of both is printed. `ranks`: the prompts of `drafts`, 8 at once, to a server of one process, and to servers
whose model is split over `--ranks` processes, all with drafts, a host tier and a pool so small that requests are
preempted. A server that needs more than `--minutes` is asked no further; what all have answered is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from millrace.bench.http.speculating import WORKLOADS, messages_of
from millrace.bench.local_server import LocalServer

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 30}, "score": {"type": "integer"}},
    "required": ["title", "score"],
    "additionalProperties": False,
}
CONCURRENCIES = (1, 4, 16)


def asked(number: int) -> dict[str, Any]:
    """The body of a request. Numbers differ by workload, text and, in a quarter of them, by a schema."""
    messages = messages_of(WORKLOADS[number % len(WORKLOADS)], number)
    question = {"role": "user", "content": f"{number}. {messages[0]['content']}"}
    if number % 4 == 3:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        return {"messages": [question], "response_format": form}
    begun = {"continue_final_message": True, "add_generation_prompt": False} if len(messages) > 1 else {}
    return {"messages": [question, *messages[1:]], **begun}


def long_prompt(number: int, num_words: int) -> dict[str, Any]:
    words = " ".join(f"item{(number * 7919 + at * 104729) % 9973}" for at in range(num_words))
    return {"messages": [{"role": "user", "content": f"List {number}: {words}\nWhich item comes first?"}]}


class Client:
    def __init__(self, url: str, max_tokens: int) -> None:
        self._url, self._max_tokens = url, max_tokens

    async def answers(self, bodies: list[dict[str, Any]], concurrency: int) -> list[list[int]]:
        """Token ids of each answer."""
        gate = asyncio.Semaphore(concurrency)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def one(body: dict[str, Any]) -> list[int]:
                whole = {**body, "temperature": 0, "max_tokens": self._max_tokens, "return_token_ids": True}
                async with gate, session.post(f"{self._url}/v1/chat/completions", json=whole) as reply:
                    answer = json.loads(await reply.read())
                    if reply.status != 200:
                        raise SystemExit(f"{reply.status}: {answer}")
                    return list(answer["choices"][0]["token_ids"])

            return list(await asyncio.gather(*map(one, bodies)))

    async def metric(self, name: str) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and "#" not in line)


async def drafts(options: argparse.Namespace) -> bool:
    common = ["--dtype", "float32"]
    bodies, found = [asked(number) for number in range(options.prompts)], {}
    for speculate in ("off", options.speculate):
        with LocalServer([*common, "--speculate", speculate]) as server:
            await server.wait_ready()
            client = Client(server.url, options.max_tokens)
            for concurrency in CONCURRENCIES:
                began = time.monotonic()
                found[speculate, concurrency] = await client.answers(bodies, concurrency)
                print(f"{speculate}, {concurrency} at once: {time.monotonic() - began:.1f} s", flush=True)
            accepted = await client.metric("millrace_engine_drafts_total")
            print(f"{speculate}: drafts proposed and accepted: {accepted:.0f}", flush=True)
    alone = found["off", 1]
    different = 0
    for (speculate, concurrency), answers in found.items():
        wrong = [number for number, pair in enumerate(zip(answers, alone, strict=True)) if pair[0] != pair[1]]
        different += len(wrong)
        print(f"{speculate}, {concurrency} at once: {len(wrong)} of {len(alone)} answers differ {wrong[:5]}")
    return not different


async def host_tier(options: argparse.Namespace) -> bool:
    bodies = [long_prompt(number, options.words) for number in range(options.prompts)]
    found: dict[str, list[list[int]]] = {}
    for gib in ("0", "2"):
        pool = ["--kv-tokens", str(options.pool), "--kv-host-gib", gib, "--max-running", "4"]
        with LocalServer(["--dtype", "float32", *pool]) as server:
            await server.wait_ready()
            client = Client(server.url, options.max_tokens)
            for round_no in ("first", "repeat"):
                began = time.monotonic()
                found[f"{gib} GiB, {round_no}"] = await client.answers(bodies, 1)
                print(f"--kv-host-gib {gib}, {round_no}: {time.monotonic() - began:.1f} s", flush=True)
            prompts = await client.metric("millrace_engine_prompt_tokens_total")
            loaded = await client.metric("millrace_engine_host_tokens_loaded_total")
            print(
                f"prompt tokens {prompts / 2:.0f} a round, pool {options.pool}; loaded from the host tier {loaded:.0f}"
            )
    alone = found["0 GiB, first"]
    return all(answers == alone for answers in found.values())


SMALL_POOL = ("--kv-tokens", "2000", "--kv-host-gib", "0.5", "--max-running", "8")
"""Requests are preempted, and blocks go to host memory and come back."""
BATCH = 20
"""Prompts between two looks at the clock."""
MET = ("drafts", "preemptions", "cached_tokens", "host_tokens_loaded")


async def ranks(options: argparse.Namespace) -> bool:
    """The prompts, and then the first half of those that were answered in time once more."""
    bodies = [asked(number) for number in range(options.prompts)]
    own = ["--dtype", "float32", "--device", "cpu", "--speculate", options.speculate, *SMALL_POOL]
    found: dict[int, tuple[list[list[int]], list[list[int]]]] = {}
    for size in (1, *map(int, options.ranks.split(","))):
        with LocalServer([*options.model, *own, "--tensor-parallel", str(size)]) as server:
            await server.wait_ready()
            client, began = Client(server.url, options.max_tokens), time.monotonic()
            answers: list[list[int]] = []
            while len(answers) < len(bodies) and time.monotonic() - began < 60 * options.minutes:
                answers += await client.answers(bodies[len(answers) :][:BATCH], 8)
            found[size] = answers, await client.answers(bodies[: len(answers) // 2], 8)
            met = {name: int(await client.metric(f"millrace_engine_{name}_total")) for name in MET}
            print(f"{size} ranks: {len(answers)} prompts in {time.monotonic() - began:.1f} s; {met}", flush=True)
    is_same = True
    for size, parts in found.items():
        for answers, alone in zip(parts, found[1], strict=True):
            count = min(len(answers), len(alone))
            wrong = [number for number in range(count) if answers[number] != alone[number]]
            print(f"{size} ranks: {len(wrong)} of {count} answers differ {wrong[:5]}")
            is_same = is_same and bool(count) and not wrong
    return is_same


PROOFS = {"drafts": drafts, "host-tier": host_tier, "ranks": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proof", choices=tuple(PROOFS))
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--model", nargs=1, default=[], help="ranks: the model (default: the server's)")
    parser.add_argument("--ranks", default="2,3", help="numbers of processes, with commas")
    parser.add_argument("--minutes", type=float, default=30.0, help="ranks: for each server")
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--pool", type=int, default=4000, help="tokens of the KV pool")
    parser.add_argument("--words", type=int, default=120)
    options = parser.parse_args()
    options.prompts = options.prompts or (24 if options.proof == "host-tier" else 200)
    same = asyncio.run(PROOFS[options.proof](options))
    print("the same tokens" if same else "TOKENS DIFFER")
    sys.exit(not same)


if __name__ == "__main__":
    main()
