"""Sends requests to replicas over connections that are kept open."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

from millrace.errors import BadRequest, ConfigError
from millrace.gateway.replica_http.answer_parser import BrokenAnswer
from millrace.gateway.replica_http.connection import Answer, Connection

KEEP_OPEN_S = 30.0
_TARGET_CHARS = "".join(map(chr, range(0x21, 0x7F)))
"""What stays as it is in the target of a request."""
_HAS_BODY = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True)
class Origin:
    """Where a replica listens."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    """Stands before every path."""
    authority: str
    """Value of the header `Host`."""
    credentials: str
    """For `Authorization`, from a user and a password in the URL."""


@lru_cache(maxsize=1024)
def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    credentials = "Basic " + base64.b64encode(user.encode()).decode() if parts.username else ""
    port = parts.port or (443 if is_tls else 80)
    return Origin(parts.hostname or "", port, is_tls, parts.path, parts.netloc.rpartition("@")[2], credentials)


def tls_trusting(ca_file: str) -> ssl.SSLContext | None:
    """For connections to replicas whose certificates an authority of this file (PEM) may have signed, or one that the
    system trusts. None without a file."""
    if not ca_file:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:  # Also ssl.SSLError.
        raise ConfigError(
            f"replica_ca names {ca_file}, which cannot be loaded: {error}. It must be a PEM file of certificates.",
            param="replica_ca",
        ) from error
    return context


class ReplicaClient:
    def __init__(self, connect_s: float, clock: Callable[[], float], tls: ssl.SSLContext | None = None) -> None:
        """`tls`: for replicas on https; None trusts what the system does."""
        self._connect_s = connect_s
        self._clock = clock
        self._free: dict[Origin, deque[Connection]] = {}
        self._tls = tls

    async def request(self, method: str, url: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The head of the answer has come. Raises OSError if the replica cannot be reached or its answer is broken."""
        origin = origin_of(url)
        data = _request_bytes(method, origin, path, headers, body)
        connection = self._kept(origin)
        if connection is not None:
            try:
                return await connection.ask(method, data)
            except OSError:
                if connection.has_bytes:
                    raise
            # The replica closed the connection while it was idle, or is gone: a new one shows which.
        connection = await self._connect(origin)
        return await connection.ask(method, data)

    def close(self) -> None:
        for kept in self._free.values():
            for connection in list(kept):
                connection.close()
        self._free.clear()

    def _kept(self, origin: Origin) -> Connection | None:
        """The connection that was used last. Those that were idle for long are closed."""
        kept = self._free.get(origin)
        if not kept:
            return None
        oldest = self._clock() - KEEP_OPEN_S
        while kept and (not kept[0].is_open or kept[0].free_since < oldest):
            kept.popleft().close()
        while kept:
            connection = kept.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, origin: Origin) -> Connection:
        def free(connection: Connection) -> None:
            connection.free_since = self._clock()
            self._free.setdefault(origin, deque()).append(connection)

        def lost(connection: Connection) -> None:
            kept = self._free.get(origin)
            if kept is not None and connection in kept:
                kept.remove(connection)

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(free, lost), origin.host, origin.port, ssl=self._context(origin)
                )
        except TimeoutError:
            raise BrokenAnswer(f"no connection to {origin.authority} within {self._connect_s:g} s") from None
        return connection

    def _context(self, origin: Origin) -> ssl.SSLContext | None:
        if not origin.is_tls:
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _request_bytes(method: str, origin: Origin, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    if not path.startswith("/"):
        raise BadRequest(f"The request names {path[:80]!r}; send a path.", code="malformed_http")
    target = quote(origin.prefix + path, safe=_TARGET_CHARS, errors="surrogateescape")
    lines = [f"{method} {target} HTTP/1.1", f"Host: {origin.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if origin.credentials and "Authorization" not in headers:
        lines.append(f"Authorization: {origin.credentials}")
    if body or method in _HAS_BODY:
        lines.append(f"Content-Length: {len(body)}")
    if any("\r" in line or "\n" in line or "\0" in line for line in lines):
        raise BadRequest("A header has a line break in it.", code="malformed_http")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body
