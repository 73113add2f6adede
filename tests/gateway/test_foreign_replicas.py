"""vLLM, llama.cpp and Ollama behind a gateway: probes, loads, and streams that go on by text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from helpers.gateways import gateway_over

from millrace.errors import BadRequest
from millrace.gateway.foreign import continued_body, read_report
from millrace.gateway.replica import Replica
from millrace.gateway.routing.health import HealthLimits
from millrace.gateway.settings import ReplicaKind, ReplicaSettings
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

WORDS = [f" word{number}" for number in range(12)]
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
"""


class ForeignServer:
    """Completes a prompt with the words that follow it, as a server does that knows nothing of token ids."""

    def __init__(self, die_after: int = -1) -> None:
        self.die_after = die_after
        self.bodies: list[dict[str, object]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._metrics)
        app.router.add_get("/api/version", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "null"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        done = body["prompt"].count(" word")
        for number, word in enumerate(WORDS[done:]):
            if number == self.die_after:
                await asyncio.sleep(0.05)
                assert request.transport is not None
                request.transport.abort()
                return answer
            event = {"id": f"cmpl-{id(self)}", "choices": [{"index": 0, "text": word}]}
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.01)
        await answer.write(b"data: [DONE]\n\n")
        return answer


def replica_of(kind: ReplicaKind) -> Replica:
    return Replica(ReplicaSettings("http://a:1", kind=kind), HealthLimits())


def test_load_of_vllm_is_read() -> None:
    report = read_report(replica_of("vllm"), METRICS.encode())
    assert (report.running, report.waiting, report.kv_used) == (3, 2, 0.25)
    assert read_report(replica_of("ollama"), b'{"version":"0.1"}').running == 0


def test_continued_bodies() -> None:
    body = {"prompt": "Once", "max_tokens": 10}
    assert continued_body("/v1/completions", "vllm", body, " upon", 1) == {"prompt": "Once upon", "max_tokens": 9}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    continued = continued_body("/v1/chat/completions", "vllm", chat, "Hel", 1)
    assert continued is not None
    assert continued["messages"][-1] == {"role": "assistant", "content": "Hel"}
    assert continued["continue_final_message"] is True
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert continued_body("/v1/chat/completions", "vllm", {**chat, "tools": [{}]}, "x", 1) is None
    assert continued_body("/v1/messages", "vllm", chat, "x", 1) is None


@pytest.mark.live
@pytest.mark.parametrize("kind", ["vllm", "llama.cpp", "ollama"])
def test_stream_goes_on_by_text_and_says_so(kind: ReplicaKind, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.acme]\nkeys = ["{DIGEST_PREFIX}{digest_of("outer").hex()}"]\n')
    inner, outer = {"keys_file": str(keys), "replica_key": "inner"}, {"Authorization": "Bearer outer"}

    async def check() -> None:
        servers, members, runners = [ForeignServer(die_after=5), ForeignServer()], [], []
        for number, server in enumerate(servers):
            runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            members.append(ReplicaSettings(f"http://127.0.0.1:{runner.addresses[0][1]}", f"f{number}", kind))
        try:
            async with gateway_over(*members, policy="round-robin", **inner) as gateway:
                seen = [await gateway.stream("Once", max_tokens=50, headers=outer) for _ in range(2)]
                assert [one.text for one in seen] == ["".join(WORDS)] * 2
                moved = next(one for one in seen if one.comments)
                assert moved.comments == [": resumed by text on f1"]
                assert len(moved.ids) == 1
                assert any(body["prompt"] == "Once" + "".join(WORDS[:5]) for body in servers[1].bodies)
                salts = {str(body.get("cache_salt", "")) for server in servers for body in server.bodies}
                assert [len(salt) for salt in salts] == [64 if kind == "vllm" else 0], "of the tenant, moved or not"
        finally:
            for runner in runners:
                await runner.cleanup()

    asyncio.run(check())


def test_tenants_share_no_prefixes_on_vllm() -> None:
    def sent(kind: ReplicaKind, path: str, salt: str, **given: str) -> dict[str, str]:
        replica = replica_of(kind)
        body: dict[str, str] = json.loads(replica.salted_body(path, json.dumps({"model": "m", **given}).encode(), salt))
        return body

    for path in ("/v1/completions", "/v1/chat/completions"):
        assert sent("vllm", path, "tenant") == {"model": "m", "cache_salt": "tenant"}
        assert sent("vllm", path, "tenant", cache_salt="own")["cache_salt"] == "tenant.own"
        assert sent("vllm", path, "", cache_salt="own")["cache_salt"] == "own"
        assert sent("ollama", path, "tenant") == {"model": "m"}
    assert sent("vllm", "/v1/embeddings", "tenant") == {"model": "m"}
    with pytest.raises(BadRequest):
        replica_of("vllm").salted_body("/v1/completions", b"[1]", "x")
