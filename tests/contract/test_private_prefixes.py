"""One tenant's prompts leave no trace in what another is told: cached tokens, explanations, lists, events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from contract.real_server import RealServer, real_server
from helpers.tiny_server import NAME, tiny_options
from serve.wire import post
from serve.wire import request as ask

from millrace.serve.tenancy.keyring import digest_of

pytestmark = pytest.mark.live
COMPLETIONS = "/v1/completions"
TENANTS = ("acme", "other")
PROMPT = list(range(300, 400))


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{tenant}"}


def cached(server: RealServer, tenant: str, name: str) -> int:
    sent = {"model": NAME, "prompt": PROMPT, "max_tokens": 2}
    reply = post(server.port, COMPLETIONS, sent, {**bearer(tenant), "X-Request-Id": name})
    assert reply.status == 200, reply.body
    found: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RealServer, bool]]:
    shares: bool = request.param
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(f'[tenants.{name}]\nkeys = ["sha256:{digest_of(f"key-{name}").hex()}"]\n' for name in TENANTS)
    )
    options = (*tiny_options(tmp_path), "--keys-file", str(keys), *(("--share-prefixes",) if shares else ()))
    with ExitStack() as stack:
        yield stack.enter_context(real_server(*options)), shares


def test_a_prefix_is_found_by_its_tenant_alone(server: tuple[RealServer, bool]) -> None:
    running, shares = server
    assert cached(running, "acme", "first") == 0
    assert cached(running, "acme", "again") == 96
    assert cached(running, "other", "probe") == (96 if shares else 0)
    why = ask(running.port, "GET", "/v1/requests/probe/explain", headers=bearer("other")).json["sequences"][0]["cache"]
    assert (why["cached_tokens"], why["diverged_at_token"]) == (96 if shares else 0, None)
    if not shares:
        assert why["why"] == "No cached prefix matches this prompt."
    turned = PROMPT[:32] + PROMPT[48:64] + PROMPT[32:48] + PROMPT[64:]
    sent = {"model": NAME, "prompt": turned, "max_tokens": 2}
    assert post(running.port, COMPLETIONS, sent, {**bearer("acme"), "X-Request-Id": "turned"}).status == 200
    why = ask(running.port, "GET", "/v1/requests/turned/explain", headers=bearer("acme")).json["sequences"][0]["cache"]
    assert (why["cached_tokens"], why["diverged_at_token"], why["defeated_by"]) == (32, 32, "reordered")
    assert ask(running.port, "GET", "/v1/requests/first/explain", headers=bearer("other")).status == 404
    assert ask(running.port, "GET", "/v1/kv/events", headers=bearer("other")).status == 403
    metrics = ask(running.port, "GET", "/metrics", headers=bearer("other")).body.decode()
    assert 'tenant="acme"' not in metrics
    assert (
        post(
            running.port, COMPLETIONS, {"model": NAME, "prompt": PROMPT, "cache_salt": "\0acme\0"}, bearer("other")
        ).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 0
    )
