"""From the bytes of a body to work that can be started: the same over HTTP, for a batch's lines, in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from millrace.errors import DeadlineExceeded
from millrace.serve.generate.gate import enter_unattended
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.job import DEADLINE_SLACK_S, Job
from millrace.serve.generate.usage import Usage
from millrace.serve.generate.writer import Writer
from millrace.serve.state import FrontState


@dataclass(frozen=True, slots=True)
class Work:
    """A request that has been read and found good: what to generate, and how to write it."""

    generation: Generation
    make_writer: Callable[[Job], Writer]
    conclude: Callable[[Job], Awaitable[bytes]] | None = None
    """What is left to do between the last token and the client's hearing of it (`holds_end`). Gives the whole body,
    or a stream's last frames."""


Prepare = Callable[[FrontState, bytes, float, str], Awaitable[Work]]
"""Translates a body into work. Takes the body, the time it was received (`time.monotonic`) and its owner. Raises a
`MillraceError` if the request is wrong."""


async def until_done(state: FrontState, job: Job) -> None:
    """Wait for the job's end. Whoever stops waiting (the client left: cancelled) takes its sequences back."""
    loop = asyncio.get_running_loop()
    patience_s = job.generation.deadline - time.monotonic() + DEADLINE_SLACK_S
    timer = loop.call_later(patience_s, job.fail, DeadlineExceeded("The engine did not answer before the deadline."))
    state.jobs.add(job)
    try:
        await job.done
    finally:
        timer.cancel()
        state.jobs.discard(job)
        job.close()


async def whole_answer(state: FrontState, work: Work, job: Job) -> bytes:
    """Start the job, wait for it, and give its body."""
    job.start()
    await until_done(state, job)
    return job.body() if work.conclude is None else await work.conclude(job)


async def unattended_answer(
    state: FrontState, work: Work, owner: str, request_id: str, path: str, received: float
) -> tuple[bytes, Usage]:
    """The body and its usage where no HTTP request is behind the work: its owner's quotas hold, and it is counted."""
    generation, reservation = enter_unattended(state, owner, request_id, work.generation, received)
    used = 0
    try:
        job = Job(state, generation, work.make_writer)
        job.request_id, job.path, job.owner = request_id, path, owner
        try:
            body = await whole_answer(state, work, job)
        finally:
            used = job.usage().total_tokens if job.is_started else 0
            observe(state, job, received)
        return body, job.usage()
    finally:
        reservation.release(used)


def observe(state: FrontState, job: Job, received: float) -> None:
    """Count the sequences of a job that have ended."""
    for choice in job.choices:
        if choice.finish is not None:
            state.metrics.observe_sequence(choice.finish, job.submitted_at - received)
