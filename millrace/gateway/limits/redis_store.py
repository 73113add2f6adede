"""Redis as the store, for gateways on several machines. Every change is one script that the server runs, by its clock.

The client is written here: four kinds of replies and one command are all that is needed of it.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from urllib.parse import unquote, urlsplit

from millrace.errors import ConfigError
from millrace.gateway.limits.store import LEASE_S, WINDOW_S, Demand, StoreLost, Verdict

TIMEOUT_S = 1.0
_PREFIX = "millrace:limits:"
_KEPT_S = 7 * 86400
"""Debts of a tenant that was not heard of for this long are forgotten."""
_RESERVE = """
local second = tonumber(redis.call('TIME')[1])
local open, count = redis.call('HGETALL', KEYS[1]), 0
for at = 1, #open, 2 do
  if open[at] == ARGV[1] or redis.call('EXISTS', ARGV[6] .. open[at]) == 1 then count = count + tonumber(open[at + 1])
  else redis.call('HDEL', KEYS[1], open[at]) end
end
local limit, wanted, most = tonumber(ARGV[3]), tonumber(ARGV[2]), tonumber(ARGV[4])
if limit > 0 and count >= limit then return {0, second, count, 0, 0} end
local slots, order, spent = redis.call('HGETALL', KEYS[2]), {}, 0
for at = 1, #slots, 2 do
  local when = tonumber(slots[at])
  if when <= second - tonumber(ARGV[5]) then redis.call('HDEL', KEYS[2], slots[at])
  else spent = spent + tonumber(slots[at + 1]); order[#order + 1] = {when, tonumber(slots[at + 1])} end
end
if most > 0 and spent + wanted > most then
  table.sort(order, function(one, other) return one[1] < other[1] end)
  local excess, wait = spent + wanted - most, tonumber(ARGV[5])
  for _, slot in ipairs(order) do
    excess = excess - slot[2]
    if excess <= 0 then wait = slot[1] + tonumber(ARGV[5]) - second break end
  end
  return {0, second, 0, spent, math.max(1, wait)}
end
redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
redis.call('HINCRBY', KEYS[2], second, ARGV[2])
redis.call('EXPIRE', KEYS[1], 86400)
redis.call('EXPIRE', KEYS[2], 2 * tonumber(ARGV[5]))
return {1, second, 0, 0, 0}
"""
_RELEASE = """
if redis.call('HINCRBY', KEYS[1], ARGV[1], -1) < 1 then redis.call('HDEL', KEYS[1], ARGV[1]) end
if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 1 and redis.call('HINCRBY', KEYS[2], ARGV[2], ARGV[3]) < 0 then
  redis.call('HSET', KEYS[2], ARGV[2], 0)
end
return 1
"""
_SPEND = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local amount, at = unpack(redis.call('HMGET', KEYS[1], 'amount', 'at'))
local owed = 0
if amount then owed = math.max(0, tonumber(amount) - tonumber(ARGV[2]) * math.max(0, now - tonumber(at)) / 3600) end
local more = tonumber(ARGV[1])
if more ~= 0 then
  owed = owed + more
  redis.call('HSET', KEYS[1], 'amount', string.format('%.12g', owed), 'at', string.format('%.6f', now))
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return string.format('%.12g', owed)
"""


class RedisStore:
    def __init__(self, url: str, gateway: str) -> None:
        parts = urlsplit(url)
        database = parts.path.strip("/") or "0"
        if parts.scheme not in ("redis", "rediss") or not parts.hostname or not database.isdigit():
            raise ConfigError(f"{url!r} is not redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE].", param="limits_store")
        self._host = parts.hostname
        self._port = parts.port or 6379
        self._tls = ssl.create_default_context() if parts.scheme == "rediss" else None
        self._gateway = gateway
        self._database = database
        names = [unquote(one) for one in (parts.username, parts.password) if one]
        self._login = ["AUTH", *names] if parts.password else []
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def reserve(self, demand: Demand) -> Verdict:
        arguments = (self._gateway, demand.tokens, demand.max_open, demand.tokens_per_minute, WINDOW_S)
        found = await self._script(_RESERVE, self._keys(demand.tenant), *arguments, f"{_PREFIX}gateway:")
        admitted, second, num_open, spent, wait_s = map(int, found)
        return Verdict(bool(admitted), second, num_open, spent, wait_s)

    async def release(self, tenant: str, second: int, refund: int) -> None:
        await self._script(_RELEASE, self._keys(tenant), self._gateway, second, -refund)

    async def owed(self, tenant: str, per_hour: float) -> float:
        return await self._spend(tenant, 0.0, per_hour)

    async def spend(self, tenant: str, amount: float, per_hour: float) -> None:
        await self._spend(tenant, amount, per_hour)

    async def _spend(self, tenant: str, amount: float, per_hour: float) -> float:
        key = f"{_PREFIX}owed:{tenant}"
        return float(await self._script(_SPEND, (key,), f"{amount:.12g}", f"{per_hour:.12g}", _KEPT_S))

    async def beat(self) -> None:
        await self._ask("SET", f"{_PREFIX}gateway:{self._gateway}", "1", "EX", int(LEASE_S))

    async def close(self) -> None:
        self._drop()

    def _keys(self, tenant: str) -> tuple[str, str]:
        return f"{_PREFIX}open:{tenant}", f"{_PREFIX}spent:{tenant}"

    async def _script(self, script: str, keys: tuple[str, ...], *arguments: Any) -> Any:
        return await self._ask("EVAL", script, len(keys), *keys, *arguments)

    # ── the protocol ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def _ask(self, *words: Any) -> Any:
        async with self._turn:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    reader, writer = self._streams or await self._connect()
                    return await _exchange(reader, writer, words)
            except (OSError, TimeoutError, EOFError, ValueError) as error:
                self._drop()  # A reply that comes later must not be taken for the next one's.
                raise StoreLost(f"redis at {self._host}:{self._port}: {str(error) or type(error).__name__}") from error
            except BaseException:
                self._drop()
                raise

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        for words in (self._login, ["SELECT", self._database] if self._database != "0" else []):
            if words:
                await _exchange(*self._streams, words)
        return self._streams

    def _drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: Any) -> Any:
    texts = [str(word).encode() for word in words]
    writer.write(b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts))
    await writer.drain()
    return await _reply(reader)


async def _reply(reader: asyncio.StreamReader) -> Any:
    line = (await reader.readuntil(b"\r\n"))[:-2]
    kind, rest = line[:1], line[1:]
    if kind == b"-":
        raise ValueError(rest.decode(errors="replace"))
    if kind == b"+":
        return rest.decode()
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else (await reader.readexactly(int(rest) + 2))[:-2].decode()
    if kind == b"*":
        return [await _reply(reader) for _ in range(int(rest))]
    raise ValueError(f"a reply begins with {kind!r}")
