"""One request through the gateway: whole answers with retries, streams that move to another replica and go on there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from millrace.errors import EngineUnavailable, MillraceError
from millrace.gateway.fleet import NoReplica
from millrace.gateway.foreign import continued_body, text_in
from millrace.gateway.frames import AnswerId, FrameReader, before_passing_error, encode_received, has_data
from millrace.gateway.limits.usage import UsageReader
from millrace.gateway.replica import Replica
from millrace.gateway.routing.decisions import Outcome
from millrace.gateway.upstream import (
    LOST,
    REPLICA_HEADER,
    RESUME_HEADER,
    RESUME_TOKENS_HEADER,
    Opened,
    Payload,
    Refusal,
    Sender,
    answer_headers,
)
from millrace.serve.anthropic.write import stream_error
from millrace.serve.http.app_keys import EXTRA_HEADERS
from millrace.serve.http.connection import FrontProtocol
from millrace.serve.http.error_bodies import error_body
from millrace.serve.http.event_stream import EventStream, comment
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.ollama.write import error_line

RESUME_WAIT_S = 60.0
"""A stream waits this long for a replica that can continue it."""
CLIENT_STALL_S = 120.0
"""A client that reads nothing for this long is disconnected."""
FLUSH_GRACE_S = 30.0
_POLL_S = 0.05
_LINES = "application/x-ndjson"

OnResume = Callable[[str], None]
"""Is told how a stream was resumed: "tokens" or "text"."""


class ClientGone(Exception):
    """The client left, or reads nothing."""


class WentAway(Exception):
    """A replica ended a stream because it stops."""


async def relay_whole(sender: Sender, raw: bytes, begun: Opened | None = None) -> web.Response:
    """Nothing reaches the client before the whole answer is here: a lost replica costs a retry, not an error."""
    while True:
        opened = begun or await sender.open(lambda replica: Payload(raw), "retry" if sender.tried else "new")
        begun = None
        if isinstance(opened, Refusal):
            return refusal_answer(sender, opened)
        try:
            async with asyncio.timeout(sender.fleet.settings.answer_s):
                body = await opened.response.read()
        except LOST as error:
            sender.note_failure(
                opened.replica,
                opened.attempt,
                f"lost in its answer: {str(error) or type(error).__name__}",
                counts=not opened.attempt.aborted,
            )
            continue
        finally:
            opened.close()
        opened.replica.health.succeeded(sender.fleet.clock())
        return web.Response(status=opened.response.status, body=body, headers=_answer_headers(sender, opened))


def refusal_answer(sender: Sender, refusal: Refusal) -> web.Response:
    refusal.headers[REQUEST_ID_HEADER] = sender.request_id
    return web.Response(status=refusal.status, body=refusal.body, headers=refusal.headers)


def _answer_headers(sender: Sender, opened: Opened) -> CIMultiDict[str]:
    headers = answer_headers(opened.response.headers)
    own = {REQUEST_ID_HEADER: sender.request_id, REPLICA_HEADER: opened.replica.name, "Server": "millrace"}
    headers.update(own)
    return headers


class StreamRelay:
    """A streamed answer. Only whole frames go to the client, and the ids of their tokens are kept, so that another
    replica can continue after exactly what the client has."""

    def __init__(self, sender: Sender, raw: bytes, on_resume: OnResume) -> None:
        self._sender = sender
        self._raw = raw
        self._on_resume = on_resume
        self._request = sender.request
        self._clock = sender.fleet.clock
        self._is_lines = self._request.path.startswith("/api/")
        self._frames = FrameReader(is_lines=self._is_lines)
        self._answer_id = AnswerId()
        self._created = str(int(time.time()))
        """All replicas give the answer this time."""
        self._out: EventStream | None = None
        self._has_sent = False
        """True once the client has got data, not only signs of life."""
        self._is_foreign = False
        """True once a part of the answer came from another kind of server: there are no ids for it."""
        self._text = ""
        self._usage = UsageReader()
        self.num_frames = 0
        self.num_resumes = 0
        self.first_at = 0.0
        """When the client got its first data."""

    def used_tokens(self) -> tuple[int, int]:
        """Of the prompt and of the answer: as the answer said, else estimated and counted."""
        ids = self._frames.received(self._sender.facts.num_choices)
        counted = sum(len(one) for one, _ in ids) or self.num_frames
        prompt = self._usage.prompt_tokens or self._sender.facts.asked.prompt_tokens
        return prompt, max(counted, self._usage.output_tokens)

    async def run(self) -> web.StreamResponse:
        opened = await self._sender.open(self._payload, "new")
        while True:
            if isinstance(opened, Refusal):
                if self._out is None:
                    return refusal_answer(self._sender, opened)
                return await self._fail(EngineUnavailable("No replica could continue this stream; send it again."))
            if self._out is None and not _is_stream(opened):
                return await relay_whole(self._sender, self._raw, opened)
            try:
                lost = await self._pump(opened)
            finally:
                opened.close()
            if not lost:
                opened.replica.health.succeeded(self._sender.fleet.clock())
                return await self._end(b"")
            try:
                opened = await self._continue(opened.replica, lost)
            except MillraceError as error:
                if self._out is None:
                    raise
                return await self._fail(error)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _pump(self, opened: Opened) -> str:
        """Forward frames until the answer ends. Returns why the replica was lost, or nothing."""
        replica, attempt = opened.replica, opened.attempt
        was_slow = False
        if not replica.is_millrace:
            self._is_foreign = True
        attempt.heard_at = self._sender.fleet.clock()
        try:
            opened.response.follow(partial(self._take, opened))
            while not await opened.response.stopped():
                was_slow = attempt.is_held = True
                assert self._out is not None
                await self._until_read(self._out)
                attempt.released(self._sender.fleet.clock())
                opened.response.resume()
            if not self._frames.is_between_frames:
                return "its answer broke off"
        except WentAway:
            return "it went away and said so"
        except LOST as error:
            reason = attempt.aborted or str(error) or type(error).__name__
            self._sender.note_failure(replica, attempt, reason, counts=not attempt.aborted and not was_slow)
            return reason
        return ""

    def _take(self, opened: Opened, data: bytes) -> None:
        """Forward what has arrived. This runs for every token: no task is woken, nothing is awaited, and what most
        tokens do not need is not called."""
        frames = self._frames.feed(data)
        if not frames:
            return
        if b"error" in frames and (before := before_passing_error(frames)) is not None:
            if before:
                self._forward(opened, before, is_data=has_data(before))
            raise WentAway
        is_data, now = frames.startswith(b"data:") or has_data(frames), self._clock()
        opened.attempt.heard_at = now
        if is_data:
            replica = opened.replica
            replica.saw_frame(opened.attempt, now)
            if not replica.marks_tokens:
                replica.marks_tokens = self._frames.has_tokens
        if self._forward(opened, frames, is_data=is_data).paused:
            opened.response.pause()

    def _forward(self, opened: Opened, frames: bytes, *, is_data: bool) -> EventStream:
        out = self._out
        if out is None:
            out = self._out = self._begin(opened)
        if is_data:
            if not self._has_sent:
                self._has_sent, self.first_at = True, self._clock()
            self.num_frames += 1
            if b"_tokens" in frames or b"eval_count" in frames:
                self._usage.read(frames)
            if not self._answer_id.is_kept:
                frames = self._answer_id.rewrite(frames)
            if self._is_foreign and not self._is_lines:
                self._text += text_in(frames)
        out.send(frames)
        if out.is_gone:
            raise ClientGone
        return out

    def _begin(self, opened: Opened) -> EventStream:
        headers = answer_headers(opened.response.headers)
        media_type = headers.pop("Content-Type", "text/event-stream")
        for name in ("Cache-Control", "X-Accel-Buffering"):
            headers.pop(name, None)
        headers.update(self._request.get(EXTRA_HEADERS, {}))
        headers[REPLICA_HEADER] = opened.replica.name
        return EventStream(
            self._request,
            request_id=self._sender.request_id,
            limit_bytes=self._sender.fleet.settings.stream_buffer_kb * 1024,
            media_type=media_type,
            headers=headers,
        )

    async def _until_read(self, out: EventStream) -> None:
        """Backpressure: read nothing more of the replica until the client has read what it was sent."""
        protocol = self._request.protocol
        assert isinstance(protocol, FrontProtocol)
        try:
            async with asyncio.timeout(CLIENT_STALL_S):
                while out.paused and not out.is_gone:
                    await protocol.drained()
                    await asyncio.sleep(0)
        except (TimeoutError, ConnectionError):
            raise ClientGone from None

    # ── going on elsewhere ────────────────────────────────────────────────────────────────────────────────────────────
    async def _continue(self, lost: Replica, reason: str) -> Opened | Refusal:
        sender = self._sender
        self._frames.start_again()
        if not self._has_sent:
            return await sender.open(self._payload, "retry")
        self.num_resumes += 1
        if self.num_resumes > sender.fleet.settings.max_resumes:
            raise EngineUnavailable(f"This stream has lost {self.num_resumes} replicas; send it again.")
        if not self._can_continue(lost):
            raise EngineUnavailable(
                f"The replica was lost ({reason}), and this kind of stream cannot go on elsewhere; send it again."
            )
        self._answer_id.resumed()
        sender.tried = {lost.name}
        end = time.monotonic() + RESUME_WAIT_S
        while True:
            sender.num_attempts = 0
            try:
                opened = await sender.open(self._continuation, "resume")
            except NoReplica:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(_POLL_S)
                sender.tried = set()  # The lost one may be back.
                continue
            if isinstance(opened, Opened):
                self._say_resumed(opened)
                return opened
            if time.monotonic() > end:
                return opened
            await asyncio.sleep(_POLL_S)
            sender.tried = set()

    def _can_continue(self, lost: Replica) -> bool:
        """A Millrace replica that marks no tokens has sent nobody knows which."""
        knows_place = self._is_foreign or self._frames.has_tokens or lost.marks_tokens
        return self._sender.facts.can_resume and knows_place

    def _say_resumed(self, opened: Opened) -> None:
        by_text = self._is_foreign or not opened.replica.is_millrace
        how = "text" if by_text else "tokens"
        self._on_resume(how)
        self._sender.record.notes.append(f"resumed by {how} on {opened.replica.name}")
        if by_text and self._out is not None:
            self._out.send(comment(f"resumed by text on {opened.replica.name}"))

    def _payload(self, replica: Replica) -> Payload | None:
        resumes = replica.is_millrace and self._sender.facts.can_resume
        return Payload(self._raw, ((RESUME_HEADER, self._created),) if resumes else ())

    def _continuation(self, replica: Replica) -> Payload | None:
        """What a replica needs to go on after the last frame that the client has."""
        if replica.is_millrace and not self._is_foreign:
            received = encode_received(self._frames.received(self._sender.facts.num_choices))
            names = ((RESUME_HEADER, self._created), *((RESUME_TOKENS_HEADER, part) for part in received))
            return Payload(self._raw, names)
        if not self._is_foreign:
            return None  # The text of Millrace's frames was not kept.
        kind, path = replica.settings.kind, self._request.path
        body = continued_body(path, kind, self._sender.facts.body, self._text, self.num_frames)
        return None if body is None else Payload(msgspec.json.encode(body))

    # ── ending ────────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _fail(self, error: MillraceError) -> web.StreamResponse:
        path = self._request.path
        if self._is_lines:
            return await self._end(error_line(error))
        if path == "/v1/messages":
            return await self._end(stream_error(error))
        return await self._end(b"data: %b\n\n" % error_body(error))

    async def _end(self, frames: bytes) -> web.StreamResponse:
        out = self._out
        if out is None:
            raise EngineUnavailable("The replica's answer was empty; send the request again.")
        out.end(frames)
        await out.finish(FLUSH_GRACE_S)
        return out.sent_response()


def _is_stream(opened: Opened) -> bool:
    """One that is compressed has no frames that could be read: it goes on as a whole."""
    answer = opened.response
    is_plain = answer.headers.get("Content-Encoding", "identity").lower() == "identity"
    return answer.status == 200 and is_plain and answer.content_type in ("text/event-stream", _LINES)


def outcome_of(request_id: str, sender: Sender, ended: str, began: float, first: float, num_resumes: int) -> Outcome:
    replica = sender.record.decisions[-1].choice.replica if sender.record.decisions else ""
    now = sender.fleet.clock()
    return Outcome(request_id, replica, ended, round((first or now) - began, 6), round(now - began, 6), num_resumes)
