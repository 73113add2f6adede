"""What a client sees through a gateway: the same answers as from a replica, errors and cancellation included."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from helpers.gateways import gateway_over
from helpers.waiting import until

from millrace.bench.gateway.null_replica import MODEL, NullReplica, answer_text
from millrace.errors import ConfigError
from millrace.gateway.settings import ReplicaSettings
from millrace.serve.tenancy.cache_scope import SALT_HEADER
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of
from millrace.serve.tenancy.owner import OWNER_HEADER

pytestmark = pytest.mark.live


def test_whole_answers_and_streams_pass_through() -> None:
    async def check() -> None:
        replica = NullReplica()
        async with gateway_over(replica) as gateway:
            status, body = await gateway.complete("Hello", max_tokens=5)
            assert (status, body["choices"][0]["text"]) == (200, answer_text("Hello", 5))
            seen = await gateway.stream("Hello", max_tokens=9, headers={"X-Request-Id": "abc"})
            assert seen.text == answer_text("Hello", 9)
            assert seen.is_done
            assert seen.headers["X-Request-Id"] == "abc"
            assert seen.headers["Content-Type"].startswith("text/event-stream")
            assert not seen.comments, "token ids are the gateway's own"
            assert replica.headers[-1]["X-Request-Id"] == "abc"

    asyncio.run(check())


def test_ready_models_and_metrics() -> None:
    async def check() -> None:
        async with gateway_over(NullReplica(), NullReplica(model="other")) as gateway:
            assert (await gateway.get("/ready"))[0] == 200
            _, models = await gateway.get("/v1/models")
            assert {one["id"] for one in models["data"]} == {MODEL, "other"}
            await gateway.complete()
            _, page = await gateway.get("/metrics")
            assert 'millrace_gateway_requests_total{route="/{path}",status="200"} 1.0' in page
            assert 'millrace_gateway_replica_share{replica="r0"} 1.0' in page

    asyncio.run(check())


def test_not_ready_without_a_replica(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text("")

    async def check() -> None:
        async with gateway_over(fleet_file=fleet) as gateway:
            assert (await gateway.get("/ready"))[0] == 503
            status, body = await gateway.complete()
            assert (status, body["error"]["code"]) == (503, "engine_unavailable")

    asyncio.run(check())


def test_requests_go_where_their_model_is() -> None:
    async def check() -> None:
        here, there = NullReplica(), NullReplica(model="other")
        async with gateway_over(here, there, policy="round-robin") as gateway:
            for _ in range(4):
                await gateway.post("/v1/completions", {"model": "other", "prompt": "x"})
            assert (here.num_requests, there.num_requests) == (0, 4)

    asyncio.run(check())


def test_client_that_leaves_cancels_at_the_replica() -> None:
    async def check() -> None:
        replica = NullReplica(token_ms=5)
        async with gateway_over(replica) as gateway:
            body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 100_000}
            async with gateway.session.post(gateway.url + "/v1/completions", json=body) as answer:
                await answer.content.readline()
                assert replica.num_open == 1
                answer.close()
            await until(lambda: replica.num_open == 0)
            assert replica.num_cancelled == 1
            await until(lambda: not gateway.state.fleet.replicas["r0"].attempts)
            assert gateway.state.fleet.replicas["r0"].num_failed == 0, "a client that leaves is no failure"

    asyncio.run(check())


def test_refusals_of_a_replica_are_the_answer() -> None:
    async def check() -> None:
        replica = NullReplica(status=429)
        async with gateway_over(replica) as gateway:
            status, body = await gateway.complete()
            assert (status, body["error"]["message"]) == (429, "told to")
            assert gateway.state.fleet.replicas["r0"].health.state == "healthy", "full is no failure"
            status, body = await gateway.post("/v1/completions", [])
            assert status >= 400

    asyncio.run(check())


def test_keys_are_checked_here_and_replaced() -> None:
    async def check(keys: Path) -> None:
        replica = NullReplica()
        async with gateway_over(replica, keys_file=str(keys), replica_key="inner") as gateway:
            assert (await gateway.complete())[0] == 401
            key = {"Authorization": "Bearer outer"}
            assert (await gateway.post("/v1/completions", {"prompt": "x"}, headers=key))[0] == 200
            assert replica.headers[-1]["Authorization"] == "Bearer inner"
            sent = replica.headers[-1][SALT_HEADER]
            owner = replica.headers[-1][OWNER_HEADER]
            assert owner.startswith("acme@")
            given = {**key, SALT_HEADER: "of another tenant", OWNER_HEADER: "another"}
            assert (await gateway.post("/v1/completions", {"prompt": "x"}, headers=given))[0] == 200
            assert replica.headers[-1][SALT_HEADER] == sent, "not what the client says"
            assert replica.headers[-1][OWNER_HEADER] == owner
            assert (await gateway.get("/v1/fleet", headers=key))[0] == 403, "it is not an operator's key"
            few = {"Authorization": "Bearer few"}
            for name, status in (("m:pirate", 200), ("m", 403), ("", 403)):
                asked = {"prompt": "x", **({"model": name} if name else {})}
                assert (await gateway.post("/v1/completions", asked, headers=few))[0] == status
            for headers, shown in ((key, [MODEL]), (few, [])):
                _, listed = await gateway.get("/v1/models", headers=headers)
                assert [one["id"] for one in listed["data"]] == shown
            assert (await gateway.get(f"/v1/models/{MODEL}", headers=few))[0] == 403
            for path, asked in (("/v1/rerank", {}), ("/tokenize", {"model": MODEL}), ("/api/show", {"name": MODEL})):
                assert (await gateway.post(path, asked, headers=few))[0] == 403

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        acme = f'[tenants.acme]\nkeys = ["{DIGEST_PREFIX}{digest_of("outer").hex()}"]\n'
        few = f'[tenants.few]\nkeys = ["{DIGEST_PREFIX}{digest_of("few").hex()}"]\nmodels = ["m:*"]\n'
        keys.write_text(acme + few)
        asyncio.run(check(keys))


def test_keys_pass_on_if_the_gateway_has_none() -> None:
    async def check() -> None:
        replica = NullReplica()
        async with gateway_over(replica) as gateway:
            await gateway.post("/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer mine"})
            assert replica.headers[-1]["Authorization"] == "Bearer mine"

    asyncio.run(check())


def test_slow_reader_holds_the_replica_back() -> None:
    """Buffers are bounded: the replica cannot run ahead of a client that reads nothing."""

    async def check() -> None:
        replica = NullReplica(tokens_per_frame=500)
        count = 4_000_000
        # The replica draws all of it before it begins, on the same loop.
        async with gateway_over(replica, head_s=600.0, probe_timeout_s=600.0) as gateway:
            body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": count}
            async with gateway.session.post(gateway.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200
                await answer.content.readline()
                attempt = next(iter(gateway.state.fleet.replicas["r0"].attempts))
                seen = -1
                while seen != attempt.num_frames:  # Until it stands still.
                    seen = attempt.num_frames
                    await asyncio.sleep(0.2)
                assert replica.num_open == 1, "the whole answer went into buffers"
                answer.close()
            await until(lambda: replica.num_open == 0)

    asyncio.run(check())


def test_replicas_come_and_go() -> None:
    async def check() -> None:
        other = NullReplica()
        async with gateway_over(NullReplica()) as gateway, other.running() as url:
            with_password = url.replace("://", "://user:secret@")
            status, shown = await gateway.post("/v1/fleet/replicas", {"url": with_password, "name": "new"})
            assert (status, shown["url"]) == (201, url)
            assert "secret" not in str(await gateway.get("/v1/fleet"))
            await until(lambda: len(gateway.state.fleet.open_replicas()) == 2)
            async with gateway.session.delete(gateway.url + "/v1/fleet/replicas/r0") as answer:
                assert answer.status == 200
            assert (await gateway.complete())[0] == 200
            assert other.num_requests == 1

    asyncio.run(check())


def test_fleet_file_is_read_again(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text("")

    async def check() -> None:
        async with NullReplica().running() as url, gateway_over(fleet_file=fleet) as gateway:
            fleet.write_text(f'[[replicas]]\nurl = "{url}"\nname = "a"\n')
            await until(lambda: [one.name for one in gateway.state.fleet.open_replicas()] == ["a"])
            fleet.write_text("# none\n")
            await until(lambda: not gateway.state.fleet.replicas)

    asyncio.run(check())


def test_many_streams_at_once() -> None:
    async def check() -> None:
        replicas = [NullReplica(token_ms=20), NullReplica(token_ms=20)]
        async with gateway_over(*replicas) as gateway:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as gateway.session:
                prompts = [f"prompt {number}" for number in range(256)]
                seen = await asyncio.gather(*(gateway.stream(prompt, max_tokens=8) for prompt in prompts))
            assert [one.text for one in seen] == [answer_text(prompt, 8) for prompt in prompts]

    asyncio.run(check())


def test_dashboard_shows_the_fleet() -> None:
    async def check() -> None:
        async with gateway_over(NullReplica()) as gateway:
            _, page = await gateway.get("/dashboard")
            assert "/web/fleet/main.js" in page
            await gateway.complete()
            _, fleet = await gateway.get("/v1/fleet")
            assert fleet["replicas"][0]["state"] == "healthy"
            assert fleet["routes"][0]["replica"] == "r0"
            assert fleet["routes"][0]["reason"]

    asyncio.run(check())


def test_two_gateways_share_a_port_and_replicas() -> None:
    async def check() -> None:
        replica = NullReplica()
        async with replica.running() as url:
            member = ReplicaSettings(url)
            async with gateway_over(member, reuse_port=True) as one:
                port = int(one.url.rpartition(":")[2])
                async with gateway_over(member, reuse_port=True, port=port) as other:
                    assert one.url == other.url
                    assert (await one.complete())[0] == 200
                with pytest.raises(ConfigError):
                    async with gateway_over(member, port=port):
                        pass

    asyncio.run(check())


def test_replicas_with_keys_need_none_of_the_gateway() -> None:
    """Clients' keys go on to the replicas; the gateway's own questions get no answer there but /ready."""

    async def check() -> None:
        async with gateway_over(NullReplica(key="mine")) as gateway:
            assert (await gateway.complete())[0] == 401
            key = {"Authorization": "Bearer mine"}
            assert (await gateway.post("/v1/completions", {"prompt": "x"}, headers=key))[0] == 200
            assert (await gateway.get("/v1/models", headers=key))[1]["data"][0]["id"] == MODEL
            assert (await gateway.get("/v1/models"))[0] == 401

    asyncio.run(check())


def test_registration_for_a_time_is_renewed_or_ends() -> None:
    async def check() -> None:
        async with NullReplica().running() as url, gateway_over(NullReplica()) as gateway:
            body = {"url": url, "name": "guest", "lease_s": 600}
            assert (await gateway.post("/v1/fleet/replicas", body))[0] == 201
            assert (await gateway.post("/v1/fleet/replicas", body))[0] == 200
            assert (await gateway.post("/v1/fleet/replicas", {**body, "weight": 2.0}))[0] == 400, "the name is taken"
            assert (await gateway.post("/v1/fleet/replicas", {**body, "lease_s": "long"}))[0] == 400
            assert (await gateway.post("/v1/fleet/replicas", {**body, "lease_s": 0.3}))[0] == 200
            await until(lambda: "guest" not in gateway.state.fleet.replicas)
            assert (await gateway.post("/v1/fleet/replicas", {**body, "lease_s": 0}))[0] == 201

    asyncio.run(check())


def test_addresses_of_a_name_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with NullReplica().running() as url:
            port = int(url.rpartition(":")[2])
            found: list[str] = ["127.0.0.1", "127.0.0.9"]
            fails = False
            loop = asyncio.get_running_loop()
            resolve = loop.getaddrinfo

            async def resolved(host: Any, port: Any, **more: Any) -> Any:
                if host != "replicas.internal":
                    return await resolve(host, port, **more)
                if fails:
                    raise OSError("no answer")
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

            monkeypatch.setattr(loop, "getaddrinfo", resolved)
            name = f"replicas.internal:{port}"
            async with gateway_over(discover=name, discover_s=0.02) as gateway:
                replicas = gateway.state.fleet.replicas
                await until(lambda: set(replicas) == {f"127.0.0.1:{port}", f"127.0.0.9:{port}"})
                await until(lambda: replicas[f"127.0.0.1:{port}"].health.state == "healthy")
                assert (await gateway.complete())[0] == 200
                fails = True
                await asyncio.sleep(0.1)
                assert len(replicas) == 2, "a name that cannot be resolved removes nothing"
                found, fails = ["127.0.0.1"], False
                await until(lambda: set(replicas) == {f"127.0.0.1:{port}"})

    asyncio.run(check())
