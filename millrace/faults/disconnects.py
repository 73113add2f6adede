"""Clients that disconnect at random moments: before the answer, during it, or while still sending their request."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass

from millrace.faults.leak_check import IdleReadings, readings_around
from millrace.faults.wire import Address, completion, read_answer

MEAN_STAY_S = 0.7


@dataclass(slots=True)
class ChurnResult:
    abandoned: int = 0
    completed: int = 0
    refused: int = 0
    """Connections that the system or the server refused."""
    readings: IdleReadings | None = None


async def churn(url: str, pid: int, num_clients: int, seconds: float, seed: int = 0) -> ChurnResult:
    address, result = Address.of(url), ChurnResult()
    seeds = itertools.count(seed * 1000)

    async def work(part_s: float, is_counted: bool) -> None:
        await _run_clients(address, num_clients, part_s, next(seeds), result if is_counted else ChurnResult())

    result.readings = await readings_around(url, pid, seconds, work)
    return result


async def _run_clients(address: Address, num_clients: int, seconds: float, seed: int, result: ChurnResult) -> None:
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(seed * 1_000_003 + number)
        await asyncio.sleep(rng.random())
        while time.monotonic() < end:
            try:
                await _send_one(address, rng, result)
            except OSError:
                result.refused += 1
                await asyncio.sleep(0.1)

    await asyncio.gather(*(client(number) for number in range(num_clients)))


async def _send_one(address: Address, rng: random.Random, result: ChurnResult) -> None:
    prompt = " ".join(rng.choice(("river", "mill", "wheel", "stone")) for _ in range(rng.randrange(1, 60)))
    data = completion(
        address, prompt=prompt, max_tokens=rng.randrange(1, 200), stream=rng.random() < 0.8, ignore_eos=True
    )
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        # Some disconnect halfway through sending their request.
        writer.write(data if rng.random() < 0.9 else data[: rng.randrange(len(data))])
        async with asyncio.timeout(rng.expovariate(1 / MEAN_STAY_S)):
            status, _ = await read_answer(reader)
            result.completed += status != 0
    except (TimeoutError, asyncio.IncompleteReadError):
        result.abandoned += 1
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()  # TCP reset instead of an orderly close.
        else:
            writer.close()
