"""What one replica keeps is found there, and what all must have is changed at all of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import transformers
from helpers.adapter_files import ATTENTION, write_adapter
from helpers.gateways import GatewayUnderTest, gateway_over
from helpers.served import Served, serving
from helpers.tiny_server import CONFIG, NAME, tiny_options
from helpers.waiting import until

from millrace.gateway.settings import ReplicaSettings
from millrace.serve.generate.fields.session import SESSION_HEADER
from millrace.serve.tenancy.cache_scope import SALT_HEADER
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
TURN = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    options = ("--max-context", "512", "--kv-tokens", "4096", "--allow-adapters")
    with serving(*tiny_options(folders[0]), *options) as one, serving(*tiny_options(folders[1]), *options) as other:
        yield one, other


@asynccontextmanager
async def over(pair: tuple[Served, ...], **settings: Any) -> AsyncIterator[GatewayUnderTest]:
    replicas = [ReplicaSettings(f"http://127.0.0.1:{one.port}", name=f"r{n}") for n, one in enumerate(pair)]
    async with gateway_over(*replicas, policy="round-robin", **settings) as gateway:
        yield gateway


async def delete(gateway: GatewayUnderTest, path: str, **options: Any) -> int:
    async with gateway.session.delete(gateway.url + path, **options) as answer:
        return answer.status


def test_turns_go_to_the_replica_of_their_session(pair: tuple[Served, Served]) -> None:
    async def check() -> None:
        async with over(pair) as gateway, over(pair) as other:
            made = [(await gateway.post("/v1/sessions", {"model": NAME, "id": f"s{n}"})) for n in range(2)]
            assert [status for status, _ in made] == [200, 200]
            homes = [gateway.state.homes.get("", f"sessions/s{n}") for n in range(2)]
            assert sorted(homes) == ["r0", "r1"], "each went to another replica"
            again = [(await other.post("/v1/sessions", {"model": NAME, "id": f"s{n}"}))[0] for n in range(2)]
            assert again == [409, 409], "a name is taken wherever it is"
            for number, way in enumerate((gateway, other, gateway)):
                for name in ("s0", "s1"):
                    path = f"/v1/sessions/{name}"
                    if number == 1:
                        headers = {SESSION_HEADER: name}
                        status, _ = await way.post("/v1/chat/completions", {"model": NAME, **TURN}, headers=headers)
                    else:
                        status, _ = await way.post(f"{path}/turns", TURN)
                    assert status == 200
                    assert (await way.get(path))[1]["turns"] == number + 1
            async with gateway.session.post(
                gateway.url + "/v1/sessions/s1/turns", json={**TURN, "stream": True}
            ) as answer:
                text = await answer.text()
            assert text.endswith("data: [DONE]\n\n")
            assert ": tokens" not in text
            listed = (await gateway.get("/v1/sessions"))[1]
            assert {one["id"] for one in listed["data"]} == {"s0", "s1"}
            assert listed["last_id"] == listed["data"][-1]["id"]
            for name in ("s0", "s1"):
                assert await delete(gateway, f"/v1/sessions/{name}") == 200
                assert (await gateway.post(f"/v1/sessions/{name}/turns", TURN))[0] == 404

    asyncio.run(check())


async def upload(gateway: GatewayUnderTest, model: str, **options: Any) -> str:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "x"}}
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line), filename="lines.jsonl")
    async with gateway.session.post(gateway.url + "/v1/files", data=form, **options) as answer:
        assert answer.status == 200
        made: str = (await answer.json())["id"]
        return made


def test_pages_of_lists_have_each_entry_once(pair: tuple[Served, Served]) -> None:
    async def check() -> None:
        async with over(pair) as gateway:
            made = {await upload(gateway, NAME) for _ in range(5)}
            assert len({gateway.state.homes.get("", f"files/{one}") for one in made}) == 2
            found: list[str] = []
            after, has_more = "", True
            while has_more:
                status, page = await gateway.get(f"/v1/files?limit=2{after}")
                assert (status, len(page["data"]) <= 2) == (200, True)
                found += [one["id"] for one in page["data"]]
                after, has_more = f"&after={found[-1]}", page["has_more"]
            assert len(found) == len(set(found))
            assert made <= set(found)
            assert (await gateway.get("/v1/files?after=file-unknown"))[0] == 400
            assert (await gateway.get("/v1/files?nonsense=1"))[0] == 400

    asyncio.run(check())


def test_lines_of_batches_name_only_models_that_the_key_may_use(pair: tuple[Served, Served], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = DIGEST_PREFIX + digest_of("ann").hex()
    keys.write_text(f'[tenants.ann]\nkeys = ["{digest}"]\nmodels = ["other"]\n')
    headers = {"Authorization": "Bearer ann"}

    async def check() -> None:
        async with over(pair, keys_file=str(keys)) as gateway:
            for model, status in (("other", 200), (NAME, 403)):
                file_id = await upload(gateway, model, headers=headers)
                asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
                assert (await gateway.post("/v1/batches", asked, headers=headers))[0] == status

    asyncio.run(check())


def test_models_are_made_and_deleted_at_all_replicas(pair: tuple[Served, Served]) -> None:
    async def check() -> None:
        async with over(pair) as gateway:
            body = {"model": "mario", "from": NAME, "system": "You jump.", "stream": False}
            status, text = await gateway.post("/api/create", body)
            assert status == 200, text
            for _ in range(2):
                asked = {"model": "mario", **TURN}
                assert (await gateway.post("/v1/chat/completions", asked))[0] == 200
            for one in pair:
                assert one.request("POST", "/api/show", {"model": "mario"})[0] == 200
            for headers in ({}, {"anthropic-version": "2023-06-01"}):
                _, listed = await gateway.get("/v1/models", headers=headers)
                assert [one["id"] for one in listed["data"]].count("mario") == 1
            assert listed["last_id"] == listed["data"][-1]["id"]
            tags = (await gateway.get("/api/tags"))[1]["models"]
            assert [one["name"] for one in tags].count("mario") == 1
            status, refused = await gateway.post("/api/create", {"model": "luigi", "from": "nothing"})
            assert (status, "nothing" in refused["error"]) == (404, True)
            assert pair[0].request("DELETE", "/api/delete", {"model": "mario"})[0] == 200
            assert await delete(gateway, "/api/delete", json={"model": "mario"}) == 200, "it was at one of them"
            assert pair[1].request("POST", "/api/show", {"model": "mario"})[0] == 404
            assert await delete(gateway, "/api/delete", json={"model": "mario"}) == 404
            assert await delete(gateway, "/v1/tenants/ann/cache") == 200, "at both"
            status, refused = await gateway.post("/api/pull", {"model": "x"})
            assert (status, "each replica" in refused["error"]) == (501, True)

    asyncio.run(check())


def test_adapters_are_added_and_removed_at_all_replicas(pair: tuple[Served, Served], tmp_path: Path) -> None:
    values = {name: value for name, value in CONFIG.items() if name != "architectures"}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    write_adapter(tmp_path / "one", base, rank=4, targets=ATTENTION, seed=1, size=8.0)

    async def check() -> None:
        async with over(pair) as gateway:
            added = {"name": "one", "path": str(tmp_path / "one")}
            assert (await gateway.post("/v1/adapters", added))[0] == 200
            asked = {"model": "one", "prompt": "Why", "max_tokens": 2}
            answers = [await gateway.post("/v1/completions", asked) for _ in range(2)]
            assert [answer["model"] for _, answer in answers] == [f"{NAME}:one"] * 2
            assert pair[0].request("DELETE", "/v1/adapters/one")[0] == 200
            status, refused = await gateway.post("/v1/adapters", added)
            assert status == 409
            assert "r0 did this, but r1 did not: There is an adapter" in refused["error"]["message"]
            assert await delete(gateway, f"/v1/adapters/{NAME}:one") == 200
            for _ in range(2):
                assert (await gateway.post("/v1/completions", asked))[0] == 404
            gateway.state.watch.lost(gateway.state.fleet.replicas["r1"], "it is gone")
            status, refused = await gateway.post("/v1/adapters", added)
            assert (status, "r1 cannot be reached" in refused["error"]["message"]) == (503, True)
            assert pair[0].request("GET", "/v1/adapters/one")[0] == 404, "nothing was changed"

    asyncio.run(check())


def test_a_replica_that_joins_gets_the_adapters_of_clients(pair: tuple[Served, Served], tmp_path: Path) -> None:
    values = {name: value for name, value in CONFIG.items() if name != "architectures"}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    write_adapter(tmp_path / "late", base, rank=4, targets=ATTENTION, seed=2, size=8.0)

    async def check() -> None:
        async with over(pair[:1]) as gateway:
            added = {"name": "late", "path": str(tmp_path / "late")}
            assert (await gateway.post("/v1/adapters", added))[0] == 200
            asked = {"model": "late", "prompt": "Why", "max_tokens": 2}
            fleet, replica = gateway.state.fleet, ReplicaSettings(f"http://127.0.0.1:{pair[1].port}", name="r1")
            gateway.state.watch.follow(fleet.add(replica))
            async with asyncio.timeout(60):
                while fleet.replicas["r1"].lacks_adapters or fleet.replicas["r1"].models.find("late") is None:
                    assert (await gateway.post("/v1/completions", asked))[0] == 200
                    await asyncio.sleep(0.02)
            used = set()
            for _ in range(4):
                async with gateway.session.post(gateway.url + "/v1/completions", json=asked) as answer:
                    used.add((answer.status, answer.headers["X-Millrace-Replica"]))
            assert used == {(200, "r0"), (200, "r1")}
            assert await delete(gateway, "/v1/adapters/late") == 200

    asyncio.run(check())


def test_a_replica_that_joins_gets_the_models_that_clients_made(pair: tuple[Served, Served], tmp_path: Path) -> None:
    values = {name: value for name, value in CONFIG.items() if name != "architectures"}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    folder = write_adapter(tmp_path / "files", base, rank=4, targets=ATTENTION, seed=3, size=8.0)

    async def check() -> None:
        async with over(pair[:1]) as gateway:
            digests = {}
            for file in folder.iterdir():
                digests[file.name] = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
                url = f"{gateway.url}/api/blobs/{digests[file.name]}"
                async with gateway.session.post(url, data=file.read_bytes()) as answer:
                    assert answer.status == 201
            made = {"model": "sailor", "from": NAME, "system": "Ahoy.", "parameters": {"top_k": 7}, "stream": False}
            assert (await gateway.post("/api/create", {**made, "adapters": digests}))[0] == 200
            plain = {"model": "plain", "from": NAME, "system": "Be plain.", "stream": False}
            assert (await gateway.post("/api/create", plain))[0] == 200
            fleet, replica = gateway.state.fleet, ReplicaSettings(f"http://127.0.0.1:{pair[1].port}", name="r1")
            gateway.state.watch.follow(fleet.add(replica))
            joined = fleet.replicas["r1"]
            await until(lambda: not joined.lacks_adapters and joined.models.find("sailor") is not None)
            said = set()
            for one in pair:
                asked = {"model": "sailor", **TURN}
                status, answer = await asyncio.to_thread(one.request, "POST", "/v1/chat/completions", asked)
                assert status == 200
                said.add(answer["choices"][0]["message"]["content"])
                shown = (await asyncio.to_thread(one.request, "POST", "/api/show", {"model": "sailor"}))[1]
                assert 'SYSTEM """Ahoy."""' in shown["modelfile"]
                assert "PARAMETER top_k 7" in shown["modelfile"]
                assert (await asyncio.to_thread(one.request, "POST", "/api/show", {"model": "plain"}))[0] == 200
            assert len(said) == 1
            status, refused = await asyncio.to_thread(
                pair[1].request, "POST", "/v1/created", {"name": "plain", "model": NAME}
            )
            assert (status, "already" in refused["error"]["message"]) == (409, True)
            for name in ("sailor", "plain"):
                assert await delete(gateway, "/api/delete", json={"model": name}) == 200

    asyncio.run(check())


def test_a_tenant_of_the_gateway_is_forgotten_at_all_replicas(pair: tuple[Served, Served], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    names = ("ann", "bob", "boss")
    own = {name: f'keys = ["{DIGEST_PREFIX}{digest_of(name).hex()}"]' for name in names}
    own["boss"] += "\noperator = true"
    keys.write_text("".join(f"[tenants.{name}]\n{lines}\n" for name, lines in own.items()))
    prompt = [300 + 7 * place % 900 for place in range(100)]

    async def check() -> None:
        async with over(pair, keys_file=str(keys)) as gateway:
            headers = {name: {"Authorization": f"Bearer {name}"} for name in names}

            async def found(name: str) -> list[bool]:
                """Whether the prompt was cached, at one replica after the other."""
                asked = {"model": NAME, "prompt": prompt, "max_tokens": 1}
                answers = [await gateway.post("/v1/completions", asked, headers=headers[name]) for _ in range(2)]
                return [body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for _, body in answers]

            for name in ("ann", "bob"):
                assert [await found(name), await found(name)] == [[False, False], [True, True]]
            kept = {"model": NAME, "prompt": prompt, "name": "mine"}
            assert (await gateway.post("/v1/cache", kept, headers=headers["ann"]))[0] == 200
            async with gateway.session.delete(gateway.url + "/v1/tenants/ann/cache", headers=headers["boss"]) as answer:
                gone = await answer.json()
            assert answer.status == 200, gone
            assert (gone["tenant"], gone["handles"], gone["shares_prefixes"]) == ("ann", 1, False)
            assert gone["blocks"]["device"] >= 2
            assert (await gateway.get("/v1/cache", headers=headers["ann"]))[1]["data"] == []
            assert [await found("bob"), await found("ann")] == [[True, True], [False, False]]

    asyncio.run(check())


def test_a_replica_with_keys_of_its_own_says_what_it_cannot_tell(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.gate]\nkeys = ["{DIGEST_PREFIX}{digest_of("gate").hex()}"]\noperator = true\n')
    with serving(*tiny_options(tmp_path), "--keys-file", str(file)) as replica:
        headers = {"Authorization": "Bearer gate", SALT_HEADER: "abc"}
        status, refused = replica.request("DELETE", "/v1/tenants/ann@0/cache", None, headers)[:2]
        assert status == 501
        assert "instead of keys" in json.dumps(refused)


def test_only_operators_change_what_replicas_have(pair: tuple[Served, Served], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digests = {name: DIGEST_PREFIX + digest_of(name).hex() for name in ("ann", "boss")}
    lines = [
        f'[tenants.{name}]\nkeys = ["{one}"]\noperator = {json.dumps(name == "boss")}\n'
        for name, one in digests.items()
    ]
    keys.write_text("".join(lines))
    body = {"model": "toad", "from": NAME, "stream": False}

    async def check() -> None:
        async with over(pair, keys_file=str(keys)) as gateway:
            for key, status in (("ann", 403), ("boss", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await gateway.post("/api/create", body, headers=headers))[0] == status
            assert await delete(gateway, "/api/delete", json={"model": "toad"}, headers=headers) == 200
            assert await delete(gateway, "/v1/tenants/ann/cache", headers={"Authorization": "Bearer ann"}) == 403
        async with over(pair, host="0.0.0.0") as gateway:
            url = gateway.url.replace("0.0.0.0", "127.0.0.1")
            async with gateway.session.post(url + "/api/create", json=body) as answer:
                assert answer.status == 403, "anybody may be its client"

    asyncio.run(check())
