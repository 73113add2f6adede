"""Cost of the messages between engine and fronts: `python -m millrace.bench.micro.link --fronts 1,6 --rows 2048`.

Front processes answer every step with one message. The engine's end, in this process, behaves like a busy loop: every
few milliseconds it sends one step to each front, waits for the first answer, and receives once more.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass

from millrace.bench.errors import BenchError
from millrace.bench.http.client_processes import START_LIMIT_S, end_process
from millrace.link.engine_end import SocketEngineChannel
from millrace.link.front_end import SocketFrontChannel
from millrace.link.messages import FRONT_SHIFT, Abort, Hello, StepTokens, ToFront

GAP_S = 0.003
ANSWER_LIMIT_S = 5.0
WARM_UP_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class LinkCost:
    fronts: int
    rows: int
    send_us: float
    """Time to send one step to every front."""
    answer_us: float
    """From the first send to the first answer: a round trip through the front's loop."""
    empty_us: float
    """Time of a receive that finds nothing."""


def measure_link(fronts: int, rows: int, rounds: int = 300) -> LinkCost:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="millrace-"))
        engine = SocketEngineChannel(directory, fronts)
        cleanup.callback(engine.close)
        for index in range(fronts):
            process = context.Process(target=_answer, args=(directory, index), daemon=True)
            process.start()
            cleanup.callback(end_process, process)
        _receive(engine, fronts, START_LIMIT_S)
        steps = [_step(index, rows // fronts) for index in range(fronts)]
        times = [_round(engine, steps) for _ in range(WARM_UP_ROUNDS + rounds)][WARM_UP_ROUNDS:]
    send, answer, empty = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return LinkCost(fronts, rows, send, answer, empty)


def _round(engine: SocketEngineChannel, steps: list[StepTokens]) -> tuple[float, float, float]:
    """Seconds of sending, of the round trip to the first answer, and of an empty receive."""
    end = time.monotonic() + GAP_S
    while time.monotonic() < end:
        pass
    began = time.perf_counter()
    for index, step in enumerate(steps):
        engine.send(index, step)
    sent = time.perf_counter()
    first = engine.receive(ANSWER_LIMIT_S, poll_s=ANSWER_LIMIT_S)
    answered = time.perf_counter()
    _receive(engine, len(steps) - len(first), ANSWER_LIMIT_S)
    looked = time.perf_counter()
    engine.receive(0.0)
    return sent - began, answered - began, time.perf_counter() - looked


def _receive(engine: SocketEngineChannel, count: int, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while count > 0:
        if time.monotonic() > end:
            raise BenchError(f"{count} fronts did not reply within {limit_s:g} s.")
        count -= len(engine.receive(0.1))


def _step(front_index: int, rows: int) -> StepTokens:
    request_id = (front_index << FRONT_SHIFT) + 1
    return StepTokens(step_no=1, ids=request_id.to_bytes(8, "little") * rows, tokens=bytes(4 * rows))


def _answer(directory: str, front_index: int) -> None:
    import uvloop

    async def work() -> None:
        channel = SocketFrontChannel(directory, front_index)
        answer = Abort((front_index << FRONT_SHIFT,))

        def on_message(message: ToFront) -> None:
            channel.send(answer)

        channel.start(asyncio.get_running_loop(), on_message)
        channel.send(Hello(front_index))
        await asyncio.Event().wait()

    uvloop.run(work())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m millrace.bench.micro.link", description=__doc__)
    parser.add_argument("--fronts", default="1,6", help="numbers of fronts (default: 1,6)")
    parser.add_argument("--rows", default="1,2048", help="rows per step, over all fronts (default: 1,2048)")
    parser.add_argument("--rounds", type=int, default=300, help="measured steps (default: 300)")
    options = parser.parse_args()
    print("fronts   rows   send to all   first answer   empty receive   (medians, µs)")
    for fronts in map(int, options.fronts.split(",")):
        for rows in map(int, options.rows.split(",")):
            cost = measure_link(fronts, max(rows, fronts), options.rounds)
            print(f"{fronts:6} {cost.rows:6} {cost.send_us:13.1f} {cost.answer_us:14.1f} {cost.empty_us:15.1f}")


if __name__ == "__main__":
    main()
