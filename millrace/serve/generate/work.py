"""A translated request that can be started: over HTTP, for a line of a batch, or in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from millrace.errors import DeadlineExceeded
from millrace.observe.audit import AuditLog
from millrace.serve.generate.choosing.beam_job import make_job
from millrace.serve.generate.events import Usage
from millrace.serve.generate.gate import enter_unattended
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.grammars import check_grammar
from millrace.serve.generate.job import DEADLINE_SLACK_S, Job
from millrace.serve.generate.writer import Writer
from millrace.serve.http.event_stream import EventStream
from millrace.serve.state import FrontState
from millrace.serve.tenancy.auditing import AuditEntry, write_ended


@dataclass(frozen=True, slots=True)
class Work:
    """A valid request: what to generate and how to write the answer."""

    state: FrontState
    """Of the model that the request names."""
    generation: Generation
    make_writer: Callable[[Job], Writer]
    conclude: Callable[[Job], Awaitable[bytes]] | None = None
    """Runs after the last token and before the end of the answer (`holds_end`). Returns the body, or the last frames of
    a stream."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers of the answer."""


Prepare = Callable[[FrontState, bytes, float, str], Awaitable[Work]]
"""Translates a body into work. Takes the state of any model, the body, the time it was received (`time.monotonic`)
and its owner; finds the state of the model that the body names. Raises a `MillraceError` if the request is wrong."""


async def until_done(state: FrontState, job: Job) -> None:
    """Wait until the job ends. If this is cancelled (the client disconnected), its sequences are aborted."""
    loop = asyncio.get_running_loop()
    timeout_s = job.generation.deadline - time.monotonic() + DEADLINE_SLACK_S
    timer = loop.call_later(timeout_s, job.fail, DeadlineExceeded("The engine did not answer before the deadline."))
    state.jobs.add(job)
    try:
        await job.done
    finally:
        timer.cancel()
        state.jobs.discard(job)
        job.close()


async def whole_answer(work: Work, job: Job) -> bytes:
    """Start the job, wait for it and return its body."""
    job.start()
    await until_done(work.state, job)
    if job.error is not None:  # It failed after its stream had begun.
        raise job.error
    return job.body() if work.conclude is None else await work.conclude(job)


async def unattended_answer(
    work: Work,
    owner: str,
    request_id: str,
    path: str,
    received: float,
    out: EventStream | None = None,
    salt: str = "",
) -> tuple[bytes, Usage]:
    """Body and usage of work without an HTTP request. It counts against its owner's quotas, in the metrics and in the
    audit log. With `out` the answer is streamed there, and its last frames are the body. `salt`: a gateway's."""
    state = work.state
    await check_grammar(state, work.generation, owner)
    generation, reservation = enter_unattended(state, owner, request_id, work.generation, received, salt)
    used = 0
    try:
        job = make_job(state, generation, work.make_writer, out)
        job.request_id, job.path, job.owner = request_id, path, owner
        try:
            body = await whole_answer(work, job)
        finally:
            used = job.usage().total_tokens if job.is_started else 0
            observe(state, job, received)
            if state.audit is not None and job.is_started:
                _audit(state.audit, job, state.model_name, received)
        return body, job.usage()
    finally:
        reservation.release(used)


def _audit(log: AuditLog, job: Job, model: str, received: float) -> None:
    usage, error = job.usage(), job.error
    ended = AuditEntry(
        request_id=job.request_id,
        tenant=job.owner,
        peer=None,
        method="BACKGROUND",
        path=job.path,
        model=model,
        status=200 if error is None else error.status,
        finish=job.finish_reason,
        error=None if error is None else error.code or error.type,
        counts=(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens),
        began=received,
    )
    write_ended(log, ended)


def observe(state: FrontState, job: Job, received: float) -> None:
    """Count the sequences of a job that have ended."""
    figures = state.figures
    figures.reasoning_tokens.inc(sum(choice.reasoning_tokens for choice in job.choices))
    for finish in job.finishes.values():
        generation = job.generation
        before_s = job.submitted_at - received
        figures.observe_sequence(finish, generation.priority, before_s, generation.params.adapter)
