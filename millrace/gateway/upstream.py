"""Requests to replicas: which headers travel, one request to one replica, and the choice of the next one on failure."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from millrace.gateway.fleet import Fleet, NoReplica
from millrace.gateway.frames import BrokenFrame
from millrace.gateway.replica import OpenAttempt, Replica
from millrace.gateway.replica_http.client import ReplicaClient
from millrace.gateway.replica_http.connection import Answer
from millrace.gateway.routing.decisions import RequestRecord, decision_span
from millrace.gateway.routing.request_facts import RequestFacts
from millrace.gateway.settings import GatewaySettings
from millrace.observe.tracing.context import TRACEPARENT
from millrace.serve.fetching.wire import FETCH_HEADER, FROM_HEADER
from millrace.serve.http.app_keys import TRACE
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.tenancy.block_ticket import TICKET_HEADER
from millrace.serve.tenancy.cache_scope import SALT_HEADER
from millrace.serve.tenancy.owner import OWNER_HEADER

RESUME_HEADER = "X-Millrace-Resume"
RESUME_TOKENS_HEADER = "X-Millrace-Resume-Tokens"
GATEWAY_KEY_HEADER = "X-Millrace-Gateway-Key"
REPLICA_HEADER = "X-Millrace-Replica"
_NOT_PASSED = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "accept-encoding", "expect", "date", "server"}
    | {REQUEST_ID_HEADER.lower(), RESUME_HEADER.lower(), RESUME_TOKENS_HEADER.lower(), "x-millrace-front"}
    | {
        GATEWAY_KEY_HEADER.lower(),
        SALT_HEADER.lower(),
        OWNER_HEADER.lower(),
        FROM_HEADER.lower(),
        FETCH_HEADER.lower(),
        TICKET_HEADER.lower(),
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-real-ip",
    }
)
"""Headers of one connection, and those that the gateway sets itself."""
RETRIED = frozenset({429, 502, 503, 504})
"""Statuses of a replica that cannot take the request now; another one may."""


class ReplicaLost(Exception):
    """The gateway gave the replica up while a request was open there."""


LOST = (aiohttp.ClientError, OSError, TimeoutError, BrokenFrame, ReplicaLost)


def passed_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_PASSED)


def answer_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers of a replica's answer that go on to the client; bytes that are no UTF-8 are replaced."""
    passed = passed_headers(headers).items()
    return CIMultiDict(
        (name, value.encode("utf-8", "surrogateescape").decode(errors="replace")) for name, value in passed
    )


def own_headers(settings: GatewaySettings) -> dict[str, str]:
    """What shows a replica that the gateway asks."""
    key = {"Authorization": f"Bearer {settings.replica_key}"} if settings.replica_key else {}
    return {**key, GATEWAY_KEY_HEADER: settings.gateway_key} if settings.gateway_key else key


def new_session(fleet: Fleet, tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """For the gateway's own questions. Requests of clients go through a `ReplicaClient`. `tls`: for https."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=fleet.settings.connect_s)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, ssl=tls or True),
        timeout=timeout,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


@dataclass(slots=True)
class Payload:
    """What one replica is sent."""

    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


PayloadFor = Callable[[Replica], Payload | None]
"""None if this kind of replica cannot take the request."""


@dataclass(slots=True)
class Opened:
    """A replica has begun to answer."""

    replica: Replica
    attempt: OpenAttempt
    response: Answer

    def close(self) -> None:
        """Idempotent. An answer that was read to its end leaves its connection to the next request."""
        self.attempt.abort = lambda: None
        self.replica.remove(self.attempt)
        self.response.close()


@dataclass(slots=True)
class Refusal:
    """The last answer of a replica that could not take the request."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


@dataclass(slots=True)
class Sender:
    """Sends one client's request to replicas, one after the other."""

    fleet: Fleet
    client: ReplicaClient
    request: web.Request
    request_id: str
    facts: RequestFacts
    record: RequestRecord
    tried: set[str] = field(default_factory=set)
    num_attempts: int = 0
    """Since the request came, or since its stream was last lost."""
    only: str = ""
    """The replica that holds what the request refers to."""
    bring: Callable[[Replica], Awaitable[str]] | None = None
    """Gives another replica what the request refers to. Returns why that failed, or nothing."""
    salt: str = ""
    """Keeps the tenant's prefixes apart at replicas, which do not know tenants of the gateway."""
    owner: str = ""
    """The tenant of the gateway, for replicas without keys."""
    path: str = ""
    """Where replicas are asked, if not where the client asked."""

    async def open(self, payload: PayloadFor, cause: str) -> Opened | Refusal:
        """The answer of the first replica that takes the request, or the last refusal."""
        refusal: Refusal | None = None
        while self.num_attempts < self.fleet.settings.max_attempts:
            self.num_attempts += 1
            try:
                opened = await self._open_hedged(payload, cause)
            except NoReplica:
                if self.bring is not None and self.only and self.only not in self.tried:
                    self.tried.add(self.only)  # It drains, or is away: others may get what it holds.
                    continue
                if refusal is not None:
                    return refusal
                raise
            cause = cause if cause == "resume" else "retry"
            if isinstance(opened, str):
                continue
            if opened.response.status not in RETRIED:
                return opened
            is_full_home = opened.response.status == 429 and opened.replica.name == self.only
            refusal = await self._read_refusal(opened) or refusal
            if is_full_home and refusal is not None:
                return refusal  # What it holds is not moved because it is busy.
        if refusal is not None:
            return refusal
        raise NoReplica(
            f"{self.num_attempts} attempts failed before the first token; the last: {self.record.notes[-1]}."
        )

    async def _read_refusal(self, opened: Opened) -> Refusal | None:
        """A replica that is full or goes away. Full is no failure."""
        replica, status = opened.replica, opened.response.status
        try:
            async with asyncio.timeout(self.fleet.settings.head_s):
                body = await opened.response.read()
            refusal = Refusal(status, answer_headers(opened.response.headers), body)
        except LOST:
            refusal = None
        finally:
            opened.close()
        self.note_failure(replica, opened.attempt, f"it answered {status}", counts=status != 429)
        return refusal

    async def _open_hedged(self, payload: PayloadFor, cause: str) -> Opened | str:
        """One replica, and a second one if the first byte takes longer than `hedge_ms`. A text: why it failed."""
        first = asyncio.ensure_future(self._open_one(payload, cause))
        hedge_s = self.fleet.settings.hedge_ms / 1e3
        try:
            if not hedge_s or self.only:  # What is stored goes on at one replica.
                return await first
            await asyncio.wait((first,), timeout=hedge_s)
            return await first if first.done() else await self._race(first, payload)
        except asyncio.CancelledError:
            _give_up(first)
            raise

    async def _race(self, first: asyncio.Future[Opened | str], payload: PayloadFor) -> Opened | str:
        """The first of two answers. The slower request is given up; a hedge that finds no replica changes nothing."""
        racing = (first, asyncio.ensure_future(self._open_one(payload, "hedge")))
        pending, failure, winner = set(racing), "", None
        try:
            while pending and winner is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    error = one.exception()
                    if error is not None and not isinstance(error, NoReplica):
                        raise error
                    opened = one.result() if error is None else str(error)
                    if isinstance(opened, Opened):
                        winner = winner or one
                    else:
                        failure = opened
            return winner.result() if winner is not None else failure
        finally:
            for one in racing:
                if one is not winner:
                    _give_up(one)

    async def _open_one(self, payload: PayloadFor, cause: str) -> Opened | str:
        is_bound = self.only and (self.bring is None or self.only not in self.tried)
        excluded = {name for name in self.fleet.replicas if name != self.only} if is_bound else self.tried
        replica, attempt = self.fleet.choose(self.facts.asked, self.record, excluded=excluded, cause=cause)
        self.tried.add(replica.name)
        attempt.span = decision_span(self.request.get(TRACE), self.record.decisions[-1])
        content = payload(replica)
        if content is None:
            replica.remove(attempt)
            return "its API cannot take this request"
        head_s = self._head_s(replica)
        try:
            if self.bring is not None and (problem := await self.bring(replica)):
                replica.remove(attempt)
                self.note_failure(replica, attempt, problem, counts=False)
                return problem
            async with asyncio.timeout(head_s) as limit:
                response = await self._send(replica, attempt, content)
        except LOST as error:
            why = f"it did not begin to answer within {head_s:g} s" if limit.expired() else _why(error)
            replica.remove(attempt)
            self.note_failure(replica, attempt, why, counts=not isinstance(error, ReplicaLost))
            return why
        except BaseException:
            replica.remove(attempt)
            raise
        return Opened(replica, attempt, response)

    def _head_s(self, replica: Replica) -> float:
        settings = self.fleet.settings
        return settings.head_s if self.facts.is_stream and replica.is_millrace else settings.answer_s

    async def _send(self, replica: Replica, attempt: OpenAttempt, content: Payload) -> Answer:
        headers = passed_headers(self.request.headers)
        headers[REQUEST_ID_HEADER] = self.request_id
        for name, value in content.headers:
            headers.add(name, value)
        headers.update(own_headers(self.fleet.settings))
        if self.salt and replica.is_millrace:
            headers[SALT_HEADER] = self.salt
        if self.owner and replica.is_millrace:
            headers[OWNER_HEADER] = self.owner
        if attempt.kv_from:
            headers[FROM_HEADER] = attempt.kv_from
        if attempt.span is not None:
            headers[TRACEPARENT] = self.request[TRACE].context.header_for(attempt.span.span_id)
        if self.fleet.settings.replica_key:
            headers.pop("X-Api-Key", None)
        task = asyncio.ensure_future(
            self.client.request(
                self.request.method,
                replica.settings.url,
                self.path or self.request.raw_path,
                headers,
                replica.salted_body(self.path or self.request.path, content.body, self.salt),
            )
        )
        attempt.abort = lambda: _cancel(task)
        try:
            response = await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()  # It came in the turn in which the client left.
            current = asyncio.current_task()
            if attempt.aborted and not (current is not None and current.cancelling()):
                raise ReplicaLost(attempt.aborted) from None
            raise
        if attempt.aborted:
            response.close()
            raise ReplicaLost(attempt.aborted)
        attempt.abort = response.close
        if (fetched := response.headers.get(FETCH_HEADER)) is not None:
            self.record.notes.append(f"{replica.name}: KV of the prompt {fetched}")
            replica.has_fetched(fetched)
        return response

    def note_failure(self, replica: Replica, attempt: OpenAttempt, reason: str, *, counts: bool = True) -> None:
        attempt.failed(reason)
        self.record.notes.append(f"{replica.name}: {reason}")
        replica.num_failed += 1
        if counts and self.fleet.rollout is not None:
            self.fleet.rollout.failed(replica.settings.group)
        if counts:
            replica.health.failed(self.fleet.clock(), reason)


def _cancel(task: asyncio.Future[Answer]) -> None:
    task.cancel()


def _give_up(task: asyncio.Future[Opened | str]) -> None:
    """Close the answer, whenever it comes."""

    def close(done: asyncio.Future[Opened | str]) -> None:
        if not done.cancelled() and done.exception() is None and isinstance(opened := done.result(), Opened):
            opened.close()

    task.cancel()
    task.add_done_callback(close)


def _why(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
