"""A replica without a model: the public API of a server as a gateway uses it, with answers that can be computed.

`python -m millrace.bench.gateway.null_replica --port 0` prints its port. The answer to a prompt is the same on every
null replica, so that a wrong, lost or repeated token in a resumed stream is seen.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from millrace.gateway.frames import decode_tokens
from millrace.gateway.routing.block_keys import block_keys
from millrace.gateway.upstream import RESUME_HEADER, RESUME_TOKENS_HEADER

MODEL = "null"
BLOCK_TOKENS = 16
_BYTES_PER_TOKEN = 4
_DONE = b"data: [DONE]\n\n"


def prompt_tokens(text: str) -> list[int]:
    data = text.encode()
    pieces = (data[start : start + _BYTES_PER_TOKEN] for start in range(0, len(data), _BYTES_PER_TOKEN))
    return [int.from_bytes(piece, "little") & 0x7FFFFFFF for piece in pieces]


def answer_tokens(text: str, count: int) -> list[int]:
    """The answer to a prompt: always the same."""
    seed = zlib.crc32(text.encode())
    return [zlib.crc32(number.to_bytes(4, "little"), seed) % 30_000 for number in range(count)]


def answer_text(text: str, count: int) -> str:
    return "".join(f" w{token}" for token in answer_tokens(text, count))


@dataclass
class NullReplica:
    """What a null replica does, and what it has seen."""

    token_ms: float = 0.0
    prefill_us: float = 0.0
    """Microseconds per prompt token that is not cached."""
    max_blocks: int = 4096
    model: str = MODEL
    status: int = 0
    """If not 0, every request gets this status."""
    die_after: int = -1
    """Tokens of a stream after which the connection breaks; -1: never."""
    hang_after: int = -1
    """Tokens of a stream after which nothing comes any more."""
    tokens_per_frame: int = 1
    confidence: float = 0.9
    """Probability of each of its tokens."""
    usage: bool = False
    """Whole answers say how many tokens they used."""
    key: str = ""
    """If set, what a client must send as its API key."""
    is_draining: bool = False
    has_events: bool = True
    sends_ids: bool = True
    num_requests: int = 0
    num_open: int = 0
    num_cancelled: int = 0
    num_computed: int = 0
    num_cached: int = 0
    headers: list[Mapping[str, str]] = field(default_factory=list)
    """Of the generating requests."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _blocks: OrderedDict[str, asyncio.Event] = field(default_factory=OrderedDict)
    _listeners: list[asyncio.Queue[bytes]] = field(default_factory=list)
    _seq: int = 0

    # ── the prefix cache ──────────────────────────────────────────────────────────────────────────────────────────────
    async def prefill(self, text: str) -> None:
        """Compute what is not cached. A prompt waits for blocks that another one is computing."""
        tokens = prompt_tokens(text)
        keys = block_keys(tokens, BLOCK_TOKENS)
        num_hits = 0
        for key in keys:
            if key not in self._blocks:
                break
            num_hits += 1
            self._blocks.move_to_end(key)
        new = {key: asyncio.Event() for key in keys[num_hits:]}
        waited = [self._blocks[key] for key in keys[:num_hits]]
        self._blocks.update(new)
        self.num_cached += num_hits * BLOCK_TOKENS
        self.num_computed += len(tokens) - num_hits * BLOCK_TOKENS
        if self.prefill_us:
            await asyncio.sleep((len(tokens) - num_hits * BLOCK_TOKENS) * self.prefill_us / 1e6)
        for ready in new.values():
            ready.set()
        for ready in waited:
            await ready.wait()
        self._tell("filled", list(new))
        evicted = []
        while len(self._blocks) > self.max_blocks:
            evicted.append(self._blocks.popitem(last=False)[0])
        self._tell("evicted", evicted)

    def _tell(self, kind: str, blocks: list[str]) -> None:
        if blocks:
            self._seq += 1
            for queue in self._listeners:
                queue.put_nowait(self._event(kind, blocks))

    def _event(self, kind: str, blocks: list[str]) -> bytes:
        event = {"seq": self._seq, "kind": kind, "tier": "device", "blocks": blocks, "block_tokens": BLOCK_TOKENS}
        return b"data: %b\n\n" % msgspec.json.encode(event)

    # ── routes ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[self._check_key])
        app.router.add_get("/v1/load", self._load)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/kv/events", self._events)
        app.router.add_post("/tokenize", self._tokenize)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        return app

    @web.middleware
    async def _check_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.key and request.path != "/ready" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "a key is needed", "code": "invalid_api_key"}}, status=401)
        return await handler(request)

    async def _load(self, request: web.Request) -> web.Response:
        report = {"model": self.model, "running": self.num_open, "waiting": 0, "waiting_tokens": 0, "kv_used": 0.0}
        return web.json_response({**report, "draining": self.is_draining, "version": "null", "models": []})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = prompt_tokens(_prompt_of(await request.json()))
        return web.json_response({"count": len(tokens), "tokens": tokens})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if not self.has_events:
            raise web.HTTPNotFound
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            await answer.write(self._event("snapshot", list(self._blocks)))
            while True:
                await answer.write(await queue.get())
        finally:
            self._listeners.remove(queue)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_requests += 1
        self.headers.append(request.headers)
        self.bodies.append(body)
        if self.status or self.is_draining:
            error = {"message": "told to", "type": "server_error", "param": None, "code": "engine_unavailable"}
            return web.json_response({"error": error}, status=self.status or 503)
        text = _prompt_of(body)
        tokens = answer_tokens(text, int(body.get("max_tokens") or 16))
        num_done = len(decode_tokens("".join(request.headers.getall(RESUME_TOKENS_HEADER, []))))
        self.num_open += 1
        try:
            await self.prefill(text)
            is_chat = request.path.endswith("chat/completions")
            if not body.get("stream"):
                await asyncio.sleep(len(tokens) * self.token_ms / 1e3)
                whole = _whole(self.model, tokens, is_chat=is_chat)
                if body.get("logprobs"):
                    logprob = math.log(self.confidence)
                    content = [{"token": f" w{token}", "logprob": logprob} for token in tokens]
                    whole["choices"][0]["logprobs"] = {"content": content}
                if self.usage:
                    whole["usage"] = {"prompt_tokens": len(prompt_tokens(text)), "completion_tokens": len(tokens)}
                return web.json_response(whole)
            return await self._stream(request, tokens, num_done, is_chat=is_chat)
        except (asyncio.CancelledError, ConnectionError):
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1

    async def _stream(
        self, request: web.Request, tokens: list[int], num_done: int, *, is_chat: bool
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        has_ids = self.sends_ids and RESUME_HEADER in request.headers
        answer_id = f"cmpl-{self.num_requests}-{id(self)}".encode()
        for number in range(num_done, len(tokens), self.tokens_per_frame):
            if self.token_ms:
                await asyncio.sleep(self.token_ms / 1e3)
            if number - num_done == self.hang_after:
                await asyncio.Event().wait()
            if number - num_done == self.die_after and request.transport is not None:
                request.transport.abort()
                return answer
            some = tokens[number : number + self.tokens_per_frame]
            is_last = number + self.tokens_per_frame >= len(tokens)
            frame = _frame(answer_id, some, has_ids, is_chat, is_last)
            await answer.write(frame + _DONE if is_last else frame)
        if num_done >= len(tokens):
            await answer.write(_DONE)
        return answer

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        """The URL under which it listens."""
        runner = web.AppRunner(self.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def _prompt_of(body: dict[str, Any]) -> str:
    if "messages" in body:
        return "".join(f"[{one['role']}]{one['content']}" for one in body["messages"])
    return str(body.get("prompt", ""))


def _frame(answer_id: bytes, tokens: list[int], has_ids: bool, is_chat: bool, is_last: bool = False) -> bytes:
    text = "".join(f" w{token}" for token in tokens).encode()
    form = b'{"index":0,"delta":{"content":"%b"}}' if is_chat else b'{"index":0,"text":"%b"}'
    form = form[:-1] + b',"finish_reason":"length"}' if is_last else form
    ids = b": tokens %b\n" % b" ".join(b"%d" % token for token in tokens) if has_ids else b""
    return ids + b'data: {"id":"%b","choices":[%b]}\n\n' % (answer_id, form % text)


def _whole(model: str, tokens: list[int], *, is_chat: bool) -> dict[str, Any]:
    text = "".join(f" w{token}" for token in tokens)
    said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"id": "cmpl-whole", "model": model, "choices": [{"index": 0, "finish_reason": "stop", **said}]}


async def _run(args: argparse.Namespace) -> None:
    replica = NullReplica(args.token_ms, args.prefill_us, args.blocks, tokens_per_frame=args.tokens_per_frame)
    async with replica.running(args.port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-ms", type=float, default=0.0)
    parser.add_argument("--prefill-us", type=float, default=0.0)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--tokens-per-frame", type=int, default=1)
    import uvloop

    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
