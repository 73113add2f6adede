"""Fetches KV blocks of a prompt from another replica before the prompt is computed.

Whatever goes wrong costs time at most: what has arrived is used, and the rest is computed. A fetch may take as long as
computing would, and no longer. A part is used only if its checksum is right and it comes from the same model, so a
fetch never changes a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal
from urllib.parse import quote
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from millrace.errors import MillraceError
from millrace.link.block_parts import PartOfPrefix, PrefixFacts
from millrace.link.client import EngineClient
from millrace.serve.fetching.shared_part import SharedPart, is_on_this_machine
from millrace.serve.fetching.source import facts_of, leading_columns
from millrace.serve.fetching.wire import OVERHEAD_BYTES, BlocksGiven, BlocksWanted, opened
from millrace.serve.tenancy.block_ticket import BLOCKS_PATH, TICKET_HEADER, ticket_for

MIN_TOKENS = 256
"""Fewer tokens are computed."""
MAX_AT_ONCE = 4
"""Fetches of a front; further prompts are computed."""
CONNECT_S = 1.0
LEAST_S, MOST_S = 0.5, 10.0
"""Bounds of the time that a fetch may take."""
FORGET_S = 60.0
"""After this time a source that was slow or failed is tried again."""
_DECAY = 0.5

Outcome = Literal["fetched", "partly", "unneeded", "slower", "failed", "corrupt"]


@dataclass(frozen=True, slots=True)
class Fetched:
    outcome: Outcome
    why: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    is_shared: bool = False
    """Its blocks came through memory that both replicas share."""

    def __str__(self) -> str:
        """One line, for the gateway's `explain`."""
        way = " through shared memory" if self.is_shared else ""
        did = f"{self.num_tokens} tokens in {self.seconds:.3f} s{way}" if self.num_tokens else "nothing"
        return f"{self.outcome}: {did}" + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is asked for: the tokens of a prompt under their salt."""

    client: EngineClient
    model: str
    owner: str
    salt: bytes
    tokens: bytes


class _Ended(Exception):
    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome: Outcome = outcome


class PrefixFetcher:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._rates: dict[str, tuple[float, float]] = {}
        """By source, bytes per second, and until when they are believed; 0 after a failure."""
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Of a prompt that is fetched: equal ones wait and then find its blocks."""
        self._num_open = 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, prefix: Prefix, source: str, key: str) -> Fetched:
        """`source`: the replica's URL. `key`: the gateway's, which replicas of one fleet share."""
        if len(prefix.tokens) < 4 * MIN_TOKENS:
            return Fetched("unneeded", "the prompt is short")
        if self._num_open >= MAX_AT_ONCE:
            return Fetched("failed", "other fetches are under way")
        name = blake2b(prefix.salt + b"\0" + prefix.tokens, digest_size=16).digest()
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._num_open += 1
        transfer = _Transfer(self, prefix, source.rstrip("/"), key)
        try:
            async with asyncio.timeout(MOST_S):
                async with lock:
                    await transfer.run()
            return transfer.ended("fetched", "")
        except _Ended as ended:
            return transfer.ended(ended.outcome, str(ended))
        except TimeoutError:
            return transfer.ended("failed", "it took longer than computing would")
        except (aiohttp.ClientError, OSError, MillraceError, msgspec.DecodeError) as error:
            return transfer.ended("failed", f"{type(error).__name__}: {error}"[:200])
        finally:
            self._num_open -= 1

    # ── what is known of sources ──────────────────────────────────────────────────────────────────────────────────────
    def rate(self, source: str) -> float | None:
        """None if it is not known."""
        rate, until = self._rates.get(source, (0.0, 0.0))
        return rate if self._clock() < until else None

    def measured(self, source: str, bytes_per_s: float) -> None:
        before = self.rate(source)
        rate = bytes_per_s if not before else _DECAY * before + (1 - _DECAY) * bytes_per_s
        self._rates[source] = rate, self._clock() + FORGET_S

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=MOST_S, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=("Content-Type",)
            )
        return self._session

    def now(self) -> float:
        return self._clock()


class _Transfer:
    def __init__(self, fetcher: PrefixFetcher, prefix: Prefix, source: str, key: str) -> None:
        self._fetcher = fetcher
        self._prefix = prefix
        self._source = source
        self._key = key
        self._began = fetcher.now()
        self._loading_at: float | None = None
        self._num_tokens = self._num_bytes = 0
        self._memory: SharedPart | None = None
        self._is_shared = False

    def ended(self, outcome: Outcome, why: str) -> Fetched:
        seconds = self._fetcher.now() - self._began
        if outcome in ("failed", "corrupt") or self._num_bytes:
            loading_s = self._fetcher.now() - (self._loading_at or self._began)
            self._fetcher.measured(self._source, self._num_bytes / max(loading_s, 1e-6))
        if self._num_tokens and outcome != "fetched":
            outcome = "partly"
        return Fetched(outcome, why, self._num_tokens, self._num_bytes, seconds, self._is_shared)

    async def run(self) -> None:
        rate = self._fetcher.rate(self._source)
        if rate == 0.0:
            raise _Ended("slower", "the source failed a moment ago")
        client, tokens = self._prefix.client, self._prefix.tokens
        facts = await facts_of(client)
        if facts is None or facts.refused:
            raise _Ended("unneeded", facts.refused if facts is not None else "the model has no KV cache")
        width = 4 * facts.block_tokens
        tokens = tokens[: (len(tokens) - 4) // width * width]  # One token of a request is always computed.
        own, there = await asyncio.gather(
            leading_columns(client, self._prefix.salt, tokens),
            self._ask(facts, BlocksWanted(self._prefix.salt, tokens)),
        )
        num_missing = there.columns - own
        if num_missing * facts.block_tokens < MIN_TOKENS:
            raise _Ended(
                "unneeded", f"{there.columns * facts.block_tokens} tokens there, {own * facts.block_tokens} here"
            )
        limit_s = self._limit_s(facts, num_missing, rate)
        self._loading_at = self._fetcher.now()
        self._memory = _shared_with(self._source, facts)
        try:
            async with asyncio.timeout(limit_s):
                await self._load(facts, tokens[: there.columns * width], own, there.columns)
        finally:
            if self._memory is not None:
                self._memory.close()

    def _limit_s(self, facts: PrefixFacts, num_missing: int, rate: float | None) -> float:
        """Raises if computing is predicted to be faster. Without a prediction the fetch is tried."""
        stats = self._prefix.client.stats
        tokens_per_s = stats.tokens_per_s if stats is not None else 0.0
        if not tokens_per_s:
            return MOST_S
        compute_s = num_missing * facts.block_tokens / tokens_per_s
        fetch_s = num_missing * facts.part_bytes / facts.part_blocks / rate if rate else 0.0
        if fetch_s > compute_s:
            raise _Ended("slower", f"fetching takes {fetch_s:.2f} s, computing {compute_s:.2f} s")
        return min(MOST_S, max(LEAST_S, compute_s))

    async def _load(self, facts: PrefixFacts, tokens: bytes, first: int, end: int) -> None:
        """The next part travels while one is written."""

        def begin(at: int) -> asyncio.Task[BlocksGiven]:
            shared = self._memory.name if self._memory is not None else ""
            wanted = BlocksWanted(self._prefix.salt, tokens, at, min(facts.part_blocks, end - at), shared)
            return asyncio.create_task(self._ask(facts, wanted))

        coming = begin(first)
        try:
            for at in range(first, end, facts.part_blocks):
                given = await coming
                if at + facts.part_blocks < end:
                    coming = begin(at + facts.part_blocks)
                if given.failure:
                    raise _Ended("failed", given.failure)
                count = min(facts.part_blocks, end - at)
                part = PartOfPrefix(
                    0, 0, self._prefix.owner, self._prefix.salt, tokens, at, count, given.blocks, given.has
                )
                answer = await self._prefix.client.move_part(part)
                if answer.failure:
                    raise _Ended("failed", answer.failure)
                self._num_tokens += count * facts.block_tokens
                self._num_bytes += len(given.blocks)
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)  # It reads from the shared memory.

    async def _ask(self, facts: PrefixFacts, wanted: BlocksWanted) -> BlocksGiven:
        asked = msgspec.msgpack.encode(wanted)
        ticket = ticket_for(asked, self._prefix.model, self._key, time.time()) if self._key else ""
        headers = {TICKET_HEADER: ticket} if ticket else {}
        url = f"{self._source}{BLOCKS_PATH}?model={quote(self._prefix.model, safe='')}"
        async with self._fetcher.session().post(url, data=asked, headers=headers, allow_redirects=False) as answer:
            if answer.status != 200:
                raise _Ended("failed", f"{self._source} answered {answer.status}")
            if answer.content_length is None or answer.content_length > facts.part_bytes + OVERHEAD_BYTES:
                raise _Ended("corrupt", "a part is too long")
            data = opened(asked, await answer.read(), self._key)
        if data is None:
            raise _Ended("corrupt", "the checksum of a part is wrong")
        given = msgspec.msgpack.decode(data, type=BlocksGiven)
        if (given.identity, given.layout, given.block_tokens) != (facts.identity, facts.layout, facts.block_tokens):
            raise _Ended("failed", f"{self._source} serves another model, or keeps its KV in another format")
        return self._from_memory(given) if given.shared else given

    def _from_memory(self, given: BlocksGiven) -> BlocksGiven:
        data = self._memory.read(given.shared_bytes, given.shared) if self._memory is not None else None
        if data is None:
            raise _Ended("corrupt", "the checksum of a part in shared memory is wrong")
        self._is_shared = True
        return msgspec.structs.replace(given, blocks=data)


def _shared_with(source: str, facts: PrefixFacts) -> SharedPart | None:
    """None for a source elsewhere, and where no memory can be shared: then parts come in the answers."""
    try:
        return SharedPart(facts.part_bytes) if is_on_this_machine(source) else None
    except OSError:
        return None
