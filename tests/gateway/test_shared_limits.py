"""Two gateways with one store: a tenant's quota is one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers.gateways import gateway_over
from helpers.waiting import until

from millrace.bench.gateway.null_replica import NullReplica
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

pytestmark = pytest.mark.live

KEYS = """
[tenants.acme]
keys = ["{prefix}{digest}"]
max_concurrent = 1
tokens_per_minute = 1000
"""


def test_quota_holds_over_both_gateways_and_is_given_back(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS.format(prefix=DIGEST_PREFIX, digest=digest_of("k").hex()))
    settings = {"keys_file": str(file), "limits_store": f"sqlite:{tmp_path / 'limits.db'}"}
    key = {"Authorization": "Bearer k"}

    async def check() -> None:
        replica = NullReplica(token_ms=10)
        async with gateway_over(replica, **settings) as one, gateway_over(replica, **settings) as other:
            await until(lambda: one.state.limits.scope == other.state.limits.scope == "shared")
            streaming = asyncio.create_task(one.stream(headers=key, max_tokens=600))
            await until(lambda: replica.num_open)
            status, body = await other.post(
                "/v1/completions", {"model": "null", "prompt": "x", "max_tokens": 1}, headers=key
            )
            assert (status, body["error"]["code"]) == (429, "quota_exceeded")
            assert "has 1 open requests; its limit is 1" in body["error"]["message"]
            streaming.cancel()
            await until(lambda: not replica.num_open and not one.state.num_open)
            replica.token_ms = 0.0
            status, body = await other.post(
                "/v1/completions", {"model": "null", "prompt": "x", "max_tokens": 900}, headers=key
            )
            assert status == 200, "a stream that was left gives back what it did not use"
            status, body = await one.post(
                "/v1/completions", {"model": "null", "prompt": "x", "max_tokens": 900}, headers=key
            )
            assert (status, body["error"]["code"]) == (429, "quota_exceeded")
            assert "tokens per minute" in body["error"]["message"]

    asyncio.run(check())
