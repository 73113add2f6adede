"""What a gateway sends in place of its tenants' names: computed once for each, and anew when a tenant has changed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from millrace.gateway import state as state_module
from millrace.gateway.fleet import Fleet
from millrace.gateway.settings import GatewaySettings
from millrace.gateway.state import GatewayState
from millrace.gateway.upstream import new_session
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant


def test_digests_of_a_tenant_are_kept_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    for name in ("gateway_salt", "gateway_owner"):
        real = getattr(state_module, name)

        def counted(*given: object, _real: object = real, _name: str = name, **named: object) -> object:
            computed.append(_name)
            return _real(*given, **named)  # type: ignore[operator]

        monkeypatch.setattr(state_module, name, counted)

    async def check() -> None:
        settings = GatewaySettings(gateway_key="secret")
        fleet = Fleet(settings)
        session = new_session(fleet, None)
        state = GatewayState(settings, fleet, session)
        one, other = Tenant(name="one"), Tenant(name="other")
        salts = [state.salt_of(tenant) for tenant in (one, other, one, Tenant(name="one"))]
        owners = [state.owner_of(tenant) for tenant in (one, other, one, Tenant(name="one"))]
        for found in (salts, owners):
            assert found[0] == found[2] == found[3] != found[1]
            assert all(found)
        assert sorted(computed) == ["gateway_owner"] * 2 + ["gateway_salt"] * 2
        assert state.salt_of(msgspec.structs.replace(one, private_cache=False)) == ""
        assert state.owner_of(msgspec.structs.replace(one, operator=True)) == f"{owners[0]};operator"
        assert (state.salt_of(DEFAULT_TENANT), state.owner_of(DEFAULT_TENANT)) == ("", "")
        assert (state.salt_of(one), state.owner_of(one)) == (salts[0], owners[0])
        await session.close()
        state.client.close()

    asyncio.run(check())
