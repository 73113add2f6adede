"""A gateway over null replicas, all in the test's process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from helpers.waiting import until

from millrace.bench.gateway.null_replica import MODEL, NullReplica
from millrace.gateway.app import serve_gateway
from millrace.gateway.settings import GatewaySettings, ReplicaSettings
from millrace.gateway.state import GatewayState

QUICK: dict[str, Any] = {"port": 0, "probe_s": 0.05, "eject_s": 0.2, "ramp_s": 0.2, "connect_s": 30.0}


@dataclass
class Streamed:
    """A stream as its client saw it."""

    status: int = 0
    text: str = ""
    ids: set[str] = field(default_factory=set)
    errors: list[Any] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    is_done: bool = False
    headers: Any = None


@dataclass
class GatewayUnderTest:
    url: str
    state: GatewayState
    session: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def complete(self, prompt: str = "Once", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def stream(self, prompt: str = "Once", headers: dict[str, str] | None = None, **fields: Any) -> Streamed:
        body = {"model": MODEL, "prompt": prompt, "stream": True, **fields}
        seen = Streamed()
        async with self.session.post(self.url + "/v1/completions", json=body, headers=headers) as answer:
            seen.status, seen.headers = answer.status, answer.headers
            async for raw in answer.content:
                line = raw.decode().rstrip("\n")
                if line == "data: [DONE]":
                    seen.is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    seen.ids.add(event.get("id"))
                    seen.errors += [event["error"]] if "error" in event else []
                    seen.text += "".join(choice["text"] for choice in event.get("choices", []))
                elif line.startswith(":"):
                    seen.comments.append(line)
        return seen


@asynccontextmanager
async def gateway_over(
    *replicas: NullReplica | ReplicaSettings, fleet_file: Path | None = None, **settings: Any
) -> AsyncIterator[GatewayUnderTest]:
    """A gateway once it has reached every replica."""
    async with AsyncExitStack() as stack:
        members = []
        for number, one in enumerate(replicas):
            if isinstance(one, NullReplica):
                one = ReplicaSettings(await stack.enter_async_context(one.running()), name=f"r{number}")
            members.append(one)
        stop, address, states = asyncio.Event(), asyncio.Future[str](), []
        serving = asyncio.create_task(
            serve_gateway(
                GatewaySettings(**{**QUICK, **settings}),
                members,
                fleet_file=fleet_file,
                on_listening=lambda host, port: address.set_result(f"http://{host}:{port}"),
                on_state=states.append,
                stop=stop,
            )
        )
        done, _ = await asyncio.wait((address, serving), return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if serving in done:
            await serving
        session = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            await until(lambda: len(states[0].fleet.open_replicas()) == len(members))
            yield GatewayUnderTest(await address, states[0], session)
        finally:
            stop.set()
            await serving
