"""Streams that refer to what one replica keeps go on at another one, which gets that first."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from helpers.gateways import GatewayUnderTest, gateway_over
from helpers.served import Served, serving
from helpers.tiny_server import NAME, tiny_options
from helpers.waiting import until

from millrace.faults.proxy import FaultyProxy
from millrace.gateway.settings import ReplicaSettings
from millrace.serve.generate.fields.session import SESSION_HEADER
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
SAID = [{"role": "user", "content": "hi"}]
LONG = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
TEXT = re.compile(r'"(?:delta|content)":"((?:[^"\\]|\\.)*)"')


@dataclass
class CutProxy(FaultyProxy):
    """Its replica dies in the middle of a stream, after `cut_after` tokens, and is away until it is said to be back."""

    cut_after: int = 0
    is_away: bool = False
    num_tokens: int = 0

    async def _copy_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.num_tokens += data.count(b": tokens")
            self.is_away = self.is_away or (self.cut_after > 0 and self.num_tokens >= self.cut_after)
            if self.is_away:
                return
            writer.write(data)
            await writer.drain()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    options = ("--max-context", "4096", "--kv-tokens", "16384")
    with serving(*tiny_options(folders[0]), *options) as one, serving(*tiny_options(folders[1]), *options) as other:
        yield one, other


@asynccontextmanager
async def over(
    pair: tuple[Served, Served], **settings: Any
) -> AsyncIterator[tuple[GatewayUnderTest, dict[str, CutProxy]]]:
    proxies = {f"r{number}": CutProxy("127.0.0.1", one.port) for number, one in enumerate(pair)}
    async with proxies["r0"].running() as first, proxies["r1"].running() as second:
        replicas = [ReplicaSettings(first, name="r0"), ReplicaSettings(second, name="r1")]
        async with gateway_over(*replicas, policy="round-robin", **settings) as gateway:
            yield gateway, proxies


async def streamed(gateway: GatewayUnderTest, path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
    """The text of a stream that ends as it should."""
    asked = {"model": NAME, **body, "stream": True}
    async with gateway.session.post(gateway.url + path, json=asked, headers=headers) as answer:
        text = await answer.text()
    assert answer.status == 200, text
    assert '"error":{' not in text, text[-500:]
    assert text.endswith("data: [DONE]\n\n") or "event: response.completed" in text or "response.incomplete" in text
    return "".join(TEXT.findall(text.partition("response.output_text.done")[0]))


async def lose_its_home(gateway: GatewayUnderTest, proxies: dict[str, CutProxy], stored: str, who: str = "") -> str:
    home = gateway.state.homes.get(who, stored)
    proxies[home].cut_after = proxies[home].num_tokens + 10
    return home


def test_a_turn_goes_on_at_another_replica_and_stays_there(pair: tuple[Served, Served]) -> None:
    async def check() -> None:
        async with over(pair) as (gateway, proxies):
            texts = {}
            for name in ("calm", "moved"):
                system = {"model": NAME, "id": name, "system": "Remember the words."}
                assert (await gateway.post("/v1/sessions", system))[0] == 200
                path = f"/v1/sessions/{name}/turns"
                first = await streamed(gateway, path, {"messages": SAID, **LONG}, {})
                home = ""
                if name == "moved":
                    home = await lose_its_home(gateway, proxies, "sessions/moved")
                header = {SESSION_HEADER: name}
                asked = {"messages": [{"role": "user", "content": "more"}], **LONG}
                second = await streamed(gateway, "/v1/chat/completions", asked, header)
                third = await streamed(gateway, path, {"messages": SAID, **LONG}, {})
                texts[name] = [first, second, third]
                shown = (await gateway.get(f"/v1/sessions/{name}"))[1]
                assert (shown["turns"], shown["messages"]) == (3, 7)
            assert texts["moved"] == texts["calm"]
            assert all(texts["calm"])
            assert proxies[home].is_away
            assert gateway.state.homes.get("", "sessions/moved") != home
            proxies[home].cut_after, proxies[home].is_away = 0, False
            back = pair[int(home[1])]
            await until(lambda: gateway.state.fleet.replicas[home].health.share(gateway.state.fleet.clock()) > 0)
            while (await asyncio.to_thread(back.request, "GET", "/v1/sessions/moved"))[0] != 404:
                await asyncio.sleep(0.02)  # Its old copy is removed.
            assert (await gateway.get("/v1/sessions/moved"))[1]["turns"] == 3

    asyncio.run(check())


@pytest.mark.parametrize("refers_by", ["previous_response_id", "conversation"])
def test_a_response_goes_on_with_what_another_replica_kept(pair: tuple[Served, Served], refers_by: str) -> None:
    long = {"max_output_tokens": 60, "temperature": 0}

    async def check() -> None:
        async with over(pair) as (gateway, proxies):
            texts = []
            for is_cut in (False, True):
                first = {"model": NAME, "input": "hi", **long}
                if refers_by == "conversation":
                    _, made = await gateway.post("/v1/conversations", {})
                    first["conversation"] = made["id"]
                status, made = await gateway.post("/v1/responses", first)
                assert status == 200
                known = first.get("conversation", made["id"])
                room = "conversations" if refers_by == "conversation" else "responses"
                if is_cut:
                    home = await lose_its_home(gateway, proxies, f"{room}/{known}")
                texts.append(await streamed(gateway, "/v1/responses", {"input": "more", refers_by: known, **long}, {}))
                if room == "conversations":
                    items = (await gateway.get(f"/v1/conversations/{known}/items"))[1]["data"]
                    assert len(items) == 4
            assert texts[0] == texts[1]
            assert proxies[home].is_away
            assert gateway.state.homes.get("", f"{room}/{known}") != home

    asyncio.run(check())


def test_a_lone_replica_is_waited_for_and_tenants_keep_their_own(pair: tuple[Served, Served], tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    names = ("ann", "bob")
    keys.write_text("".join(f'[tenants.{name}]\nkeys = ["{DIGEST_PREFIX}{digest_of(name).hex()}"]\n' for name in names))

    async def check() -> None:
        async with over(pair, keys_file=str(keys)) as (gateway, proxies):
            ann, bob = ({"Authorization": f"Bearer {name}"} for name in names)
            assert (await gateway.post("/v1/sessions", {"model": NAME, "id": "own"}, headers=ann))[0] == 200
            home = await lose_its_home(gateway, proxies, "sessions/own", "ann")
            other = "r1" if home == "r0" else "r0"
            path = "/v1/sessions/own/turns"
            first = await streamed(gateway, path, {"messages": SAID, **LONG}, ann)
            assert first
            assert gateway.state.homes.get("ann", "sessions/own") == other
            assert (await gateway.post(path, {"messages": SAID}, headers=bob))[0] == 404
            proxies[home].cut_after, proxies[home].is_away = 0, False
            await until(lambda: gateway.state.fleet.replicas[home].health.share(gateway.state.fleet.clock()) > 0)
            async with gateway.session.delete(gateway.url + "/v1/sessions/own", headers=ann) as answer:
                assert answer.status == 200

    asyncio.run(check())


def test_only_gateways_move_what_is_stored_and_never_over_what_is_newer(pair: tuple[Served, Served]) -> None:
    one, other = pair
    from_far = {"X-Forwarded-For": "192.0.2.1"}
    assert one.request("GET", "/v1/stored?at=sessions/any", None, from_far)[0] == 403
    assert one.request("GET", "/v1/stored?at=sessions/any")[0] == 404
    assert one.request("GET", "/v1/stored?at=files/any")[0] == 400
    assert one.request("POST", "/v1/sessions", {"id": "kept"})[0] == 200
    rows = raw(one, "GET", "/v1/stored?at=sessions/kept")[1]
    assert raw(other, "POST", "/v1/stored", rows)[0] == 200
    turn = {"messages": SAID, "max_tokens": 4}
    assert other.request("POST", "/v1/sessions/kept/turns", turn)[0] == 200
    status, said = raw(other, "POST", "/v1/stored", rows)
    assert (status, b"gone on here meanwhile" in said) == (409, True)
    wrong = msgspec.msgpack.encode({"names": [], "tables": {"files": [{"id": "x"}]}})
    assert raw(other, "POST", "/v1/stored", wrong)[0] == 400
    assert raw(other, "POST", "/v1/stored", b"?")[0] == 400
    for server in pair:
        assert server.request("DELETE", "/v1/sessions/kept")[0] == 200


def raw(served: Served, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
