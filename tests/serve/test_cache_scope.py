"""Scopes of cached prefixes: a tenant's are its own, and no `cache_salt` leads into another scope."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import Config, replace
from millrace.errors import ConfigError
from millrace.serve.tenancy.cache_scope import scope_of
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant, read_tenants

ACME, OTHER = Tenant(name="acme"), Tenant(name="other")
SALTS = st.text(alphabet="\0acmeother!", max_size=12)


def test_a_tenant_is_private_unless_its_operator_says_otherwise() -> None:
    assert not Config().server.share_prefixes
    private = replace(Config(), server__share_prefixes=False).server.share_prefixes
    assert scope_of(ACME, "", share_prefixes=private) != scope_of(OTHER, "", share_prefixes=private)
    assert scope_of(ACME, "", share_prefixes=True) == scope_of(OTHER, "", share_prefixes=True) == ""
    closed, opened = Tenant(name="acme", private_cache=True), Tenant(name="acme", private_cache=False)
    assert scope_of(closed, "", share_prefixes=True) == scope_of(ACME, "", share_prefixes=False)
    assert scope_of(opened, "s", share_prefixes=False) == "s"


@given(SALTS)
def test_without_tenants_the_scope_is_the_salt(salt: str) -> None:
    assert scope_of(DEFAULT_TENANT, salt, share_prefixes=False) == salt


@given(SALTS, SALTS, st.booleans(), st.booleans())
def test_no_salt_leads_into_another_scope(one: str, two: str, first_shares: bool, second_shares: bool) -> None:
    first = scope_of(Tenant(name="acme", private_cache=not first_shares), one, share_prefixes=False)
    second = scope_of(Tenant(name="other", private_cache=not second_shares), two, share_prefixes=False)
    assert (first == second) == (first_shares and second_shares and one == two)
    again = scope_of(Tenant(name="acme", private_cache=not first_shares), two, share_prefixes=False)
    assert (first == again) == (one == two)


def test_the_name_of_a_tenant_has_no_zero_byte(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants."a\\u0000b"]\n')
    with pytest.raises(ConfigError, match="zero bytes"):
        read_tenants(file)
