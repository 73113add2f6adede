"""Offers more load than the server can handle, in three priority classes, and counts what is served and rejected."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

from millrace.bench.figures import percentile
from millrace.faults.wire import Address, post_bytes

CLASSES = (("interactive", 0.2), ("standard", 0.4), ("batch", 0.4))
PROMPT_WORDS, OUTPUT_TOKENS = 48, 32
ANSWER_LIMIT_S = 300.0
CALIBRATE_S = 10.0


@dataclass(slots=True)
class ClassResult:
    name: str
    offered: int = 0
    served: int = 0
    shed: int = 0
    """Rejected with 429."""
    failed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)

    def ttft(self, percent: float) -> float:
        return percentile(self.ttft_s, percent)


async def overload(url: str, seconds: float, factor: float, concurrency: int) -> tuple[float, list[ClassResult]]:
    """Measure the server's capacity in requests/s, then offer `factor` times that for `seconds`."""
    address = Address.of(url)
    capacity = await _capacity(address, concurrency)
    results = {name: ClassResult(name) for name, _ in CLASSES}
    rng, tasks = random.Random(1), set()
    end = time.monotonic() + seconds
    due = time.monotonic()
    while due < end:
        due += rng.expovariate(capacity * factor)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        name = rng.choices([name for name, _ in CLASSES], [share for _, share in CLASSES])[0]
        task = asyncio.create_task(send_one(address, rng.randrange(1 << 30), results[name]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return capacity, list(results.values())


async def _capacity(address: Address, concurrency: int) -> float:
    """Requests/s in a closed loop with `concurrency` clients, as many as the server runs."""
    result = ClassResult("batch")
    end = time.monotonic() + CALIBRATE_S

    async def client(number: int) -> None:
        while time.monotonic() < end:
            await send_one(address, number, result)
            number += 1009

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(concurrency)))
    return result.served / (time.monotonic() - began)


async def send_one(address: Address, number: int, result: ClassResult) -> None:
    rng = random.Random(number)
    words = " ".join(rng.choice(("river", "mill", "wheel", "stone", "corn", "day")) for _ in range(PROMPT_WORDS))
    body = {
        "model": address.model,
        "prompt": f"{number} {words}",
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "priority": result.name,
    }
    result.offered += 1
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await _exchange(
                address,
                post_bytes("/v1/completions", json.dumps(body).encode(), {"Connection": "close"}),
                began,
                result,
            )
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        result.failed += 1


async def _exchange(address: Address, data: bytes, began: float, result: ClassResult) -> None:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 429"):
            result.shed += 1
            after = head.lower().partition(b"retry-after: ")[2].partition(b"\r")[0]
            result.retry_after_s.append(int(after or 0))
            return
        if not head.startswith(b"HTTP/1.1 200"):
            result.failed += 1
            return
        await reader.readuntil(b"data: ")  # Comments may come before.
        first = await reader.readuntil(b"\n")
        if first.startswith(b'{"error"'):
            result.failed += 1
            return
        result.ttft_s.append(time.monotonic() - began)
        tail = b""
        while piece := await reader.read(65536):
            tail = (tail + piece)[-64:]
        result.served += tail.endswith(b"0\r\n\r\n")
    finally:
        writer.close()
