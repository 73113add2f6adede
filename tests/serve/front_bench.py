"""How much CPU the front spends per token: `python tests/serve/front_bench.py --streams 64 --tokens 256`.

Three processes: a null engine that emits one token per running stream per step, the front under measurement, and this
one, which reads all streams. Between engine and front are the real messages over the real ZeroMQ channel. The figure is
the front's own CPU time (user and system) divided by the tokens that reached the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MODEL = "bench"


def engine_process(directory: str, vocab_size: int, step_s: float) -> None:
    """One token per row per step, from a fixed random sequence; ends rows at `max_tokens`."""
    from millrace.link.channel import ZmqEngineChannel
    from millrace.link.messages import Abort, EngineReady, Finish, NewRequest, StepTokens, Stop

    channel = ZmqEngineChannel(directory, 1)
    channel.send(0, EngineReady("null", 8192, vocab_size, 1 << 30, 16, "none", "null", {}, "fp_null"))
    random.seed(0)
    words = np.asarray([random.randrange(20, vocab_size) for _ in range(4096)], dtype="<i4")
    rows: dict[int, list[int]] = {}
    step_no = 0
    while True:
        for message in channel.receive(None if not rows else 0):
            if isinstance(message, NewRequest):
                rows[message.id] = [0, message.params.max_tokens or 1]
            elif isinstance(message, Abort):
                for request_id in message.ids:
                    rows.pop(request_id, None)
            elif isinstance(message, Stop):
                channel.close()
                return
        if not rows:
            continue
        started = time.monotonic()
        step_no += 1
        ids = np.fromiter(rows, dtype="<i8", count=len(rows))
        finished = []
        for request_id, row in list(rows.items()):
            row[0] += 1
            if row[0] == row[1]:
                del rows[request_id]
                finished.append(Finish(request_id, "length", output_tokens=row[1], prompt_tokens=8))
        channel.send(
            0, StepTokens(step_no, ids.tobytes(), np.roll(words, step_no)[: len(ids)].tobytes(), tuple(finished))
        )
        time.sleep(max(0.0, step_s - (time.monotonic() - started)))


def front_process(directory: str, port_pipe: object) -> None:
    import uvloop

    from millrace.config import Config, replace
    from millrace.link.channel import ZmqFrontChannel
    from millrace.link.client import EngineClient
    from millrace.serve.app import load_state, serve_front
    from millrace.sources.resolve import resolve_model

    async def main() -> None:
        client = EngineClient(ZmqFrontChannel(directory, 0))
        config = replace(Config(), model__served_name=MODEL, server__port=0)
        state = load_state(config, client, resolve_model(config.model.source))
        await client.wait_ready()
        await serve_front(state, "127.0.0.1", 0, on_listening=lambda host, port: port_pipe.send(port))  # type: ignore[attr-defined]

    uvloop.run(main())


async def read_stream(port: int, num_tokens: int, start: asyncio.Event, opened: asyncio.Semaphore) -> tuple[int, float]:
    """One stream, read to its end; the number of its frames and the seconds to its first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = json.dumps(
        {"model": MODEL, "prompt": "hello there", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    ).encode()
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    opened.release()
    await start.wait()
    began = time.monotonic()
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{fields}".encode() + body)
    count, first, tail = 0, 0.0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(65536)
        if not data:
            raise ConnectionError("the front closed a stream")
        first = first or time.monotonic() - began
        count += data.count(b'"text":')
        tail = (tail + data)[-16:]
    writer.close()
    return count, first


def cpu_seconds(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


async def measure(port: int, pid: int, num_streams: int, num_tokens: int) -> None:
    start, opened = asyncio.Event(), asyncio.Semaphore(0)
    tasks = [asyncio.create_task(read_stream(port, num_tokens, start, opened)) for _ in range(num_streams)]
    for _ in tasks:
        await opened.acquire()
    user, system = cpu_seconds(pid)
    began = time.monotonic()
    start.set()
    results = await asyncio.gather(*tasks)
    wall_s = time.monotonic() - began
    user_after, system_after = cpu_seconds(pid)
    frames = sum(count for count, _ in results)
    tokens = num_streams * num_tokens
    firsts = sorted(first for _, first in results)
    used = user_after - user + system_after - system
    print(
        f"{num_streams:>6} streams × {num_tokens} tokens: {tokens / wall_s:>9,.0f} tok/s,"
        f" front CPU {1e6 * used / tokens:6.2f} µs/token"
        f" (user {1e6 * (user_after - user) / tokens:.2f}, system {1e6 * (system_after - system) / tokens:.2f}),"
        f" frames/token {frames / tokens:.2f}, first chunk p50 {1e3 * firsts[len(firsts) // 2]:.0f} ms"
        f" p99 {1e3 * firsts[int(len(firsts) * 0.99)]:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of a step")
    args = parser.parse_args()
    import uvloop

    from millrace.sources.resolve import resolve_model
    from millrace.text.tokenizer import load_tokenizer

    vocab_size = load_tokenizer(resolve_model("smollm2-135m-instruct")).vocab_size
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        engine = context.Process(target=engine_process, args=(directory, vocab_size, args.step_ms / 1e3), daemon=True)
        engine.start()
        ours, theirs = context.Pipe()
        front = context.Process(target=front_process, args=(directory, theirs), daemon=True)
        front.start()
        port = ours.recv()
        assert front.pid is not None
        uvloop.run(measure(port, front.pid, 8, 32))
        for num_streams in args.streams:
            uvloop.run(measure(port, front.pid, num_streams, args.tokens))
        front.terminate()
        front.join(5)
        engine.kill()


if __name__ == "__main__":
    main()
