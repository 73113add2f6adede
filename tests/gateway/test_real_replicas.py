"""A gateway in front of real servers of a tiny model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from helpers.gateways import GatewayUnderTest, gateway_over
from helpers.served import Served, serving
from helpers.tiny_server import NAME, tiny_options
from helpers.waiting import until

from millrace.gateway.routing.prefix_map import chain_of
from millrace.gateway.settings import ReplicaSettings
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

pytestmark = pytest.mark.live

MESSAGES = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "Once",
        "max_tokens": 8,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    },
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": 8,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    },
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8, "stream": True, "temperature": 0},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16, "stream": True, "store": False, "temperature": 0},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 8, "temperature": 0}},
}
TEXT = re.compile(r'"(?:text|content|delta)":"((?:[^"\\]|\\.)*)"')


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    with serving(*tiny_options(folder)) as server:
        yield server


async def streamed(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, str, str, list[str]]:
    """Status, media type, all text, and the kinds of events in the order of their first. How tokens share frames is a
    matter of time."""
    async with session.post(url, json={"model": NAME, **body}) as answer:
        text = await answer.text()
        kinds = dict.fromkeys(line for line in text.splitlines() if line.startswith("event:"))
        return answer.status, answer.content_type, "".join(TEXT.findall(text)), list(kinds)


def test_streams_of_every_dialect_are_the_servers_own(served: Served) -> None:
    async def check() -> None:
        direct = f"http://127.0.0.1:{served.port}"
        async with gateway_over(ReplicaSettings(direct)) as gateway:
            for path, body in STREAMS.items():
                expected = await streamed(gateway.session, direct + path, body)
                seen = await streamed(gateway.session, gateway.url + path, body)
                assert seen == expected, path
                assert (seen[0], bool(seen[2])) == (200, True), path

    asyncio.run(check())


def test_errors_stored_things_and_explanations(served: Served) -> None:
    async def check() -> None:
        async with gateway_over(ReplicaSettings(f"http://127.0.0.1:{served.port}", name="real")) as gateway:
            status, body = await gateway.post("/v1/chat/completions", {"model": NAME, "messages": [], "nonsense": 1})
            assert (status, body["error"]["code"]) == (400, "unknown_field")
            status, body = await gateway.post("/v1/messages", {"model": NAME, "max_tokens": 1})
            assert (status, body["type"]) == (400, "error"), "Anthropic's shape"
            asked = {"model": NAME, "input": "hi", "max_output_tokens": 16}
            status, made = await gateway.post("/v1/responses", asked, headers={"X-Request-Id": "mine"})
            assert status == 200
            gateway.state.homes.put("", f"responses/{made['id']}", "")  # Another gateway would not know where it is.
            assert (await gateway.get(f"/v1/responses/{made['id']}"))[1]["id"] == made["id"]
            status, told = await gateway.get("/v1/requests/mine/explain")
            assert told["gateway"]["decisions"][0]["replica"] == "real"
            assert told["replica"]["request_id"] == "mine"
            status, found = await gateway.post("/tokenize", {"model": NAME, "prompt": "Once"})
            assert (status, len(found["tokens"]) > 0) == (200, True)
            assert (await gateway.get("/v1/nothing"))[0] == 404

    asyncio.run(check())


async def cached_tokens(gateway: GatewayUnderTest, tenant: str, prompt: str) -> int:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1}
    status, answer = await gateway.post("/v1/completions", body, headers={"Authorization": f"Bearer {tenant}"})
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("shares", "found"), [(False, False), (True, True)])
def test_tenants_of_a_gateway_share_no_prefixes(served: Served, tmp_path: Path, shares: bool, found: bool) -> None:
    """The replica has no keys: it does not know them."""
    keys = tmp_path / "keys.toml"
    digests = {name: DIGEST_PREFIX + digest_of(name).hex() for name in ("ann", "bob")}
    keys.write_text("".join(f'[tenants.{name}]\nkeys = ["{digest}"]\n' for name, digest in digests.items()))
    prompt = f"{shares} " + "the same words again " * 20

    async def check() -> None:
        replica = ReplicaSettings(f"http://127.0.0.1:{served.port}", name="real")
        async with gateway_over(replica, keys_file=str(keys), share_prefixes=shares) as gateway:
            assert await cached_tokens(gateway, "ann", prompt) == 0
            own = await cached_tokens(gateway, "ann", prompt)
            assert own > 0, "a tenant's own prefixes are found"
            assert (await cached_tokens(gateway, "bob", prompt) > 0) == found
            if not shares:
                chain = chain_of(msgspec.json.encode(prompt), f"{NAME}\0ann".encode())
                await until(lambda: gateway.state.fleet.prefixes.knows_keys(chain))  # Salted ones, from events.

    asyncio.run(check())
