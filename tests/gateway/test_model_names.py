"""A model has several names: keys may give any of them, and replicas that have it are found by each."""

from __future__ import annotations

import pytest

from millrace.gateway.replica import Replica
from millrace.gateway.routing.health import HealthLimits
from millrace.gateway.routing.model_list import ModelList, may_use
from millrace.gateway.settings import ReplicaSettings
from millrace.serve.tenancy.keyring import Tenant

QWEN = "org/Qwen"
ENTRIES = ModelList(
    [
        {"id": QWEN, "root": QWEN},
        {"id": "qwen", "root": QWEN},
        {"id": f"{QWEN}:pirate", "root": f"{QWEN}:pirate", "parent": QWEN},
        {"id": "mario", "root": QWEN, "parent": QWEN},
        {"id": "jack", "root": f"{QWEN}:pirate", "parent": QWEN},
        {"id": "other", "root": "other", "status": "unloaded"},
        {"id": "llama3:latest"},
    ]
)


@pytest.mark.parametrize(
    ("allowed", "asked"),
    [
        ("qwen", {"", QWEN, "qwen", "mario"}),
        (QWEN, {"", QWEN, "qwen", "mario"}),
        ("mario", {"mario"}),
        ("pirate", {f"{QWEN}:pirate", "qwen:pirate", "pirate", "jack"}),
        ("qwen:*", {f"{QWEN}:pirate", "qwen:pirate", "pirate", "jack"}),
        ("jack", {"jack"}),
        ("o*", {"", QWEN, "qwen", f"{QWEN}:pirate", "qwen:pirate", "pirate", "mario", "jack", "other", "other:latest"}),
        ("new", {"new"}),
        ("other", {"other", "other:latest"}),
        ("llama3", {"llama3", "llama3:latest"}),
    ],
)
def test_keys_may_name_a_model_by_any_of_its_names(allowed: str, asked: set[str]) -> None:
    names = {"", *ENTRIES.ids, "qwen:pirate", "pirate", "new", "other:latest", "llama3"}
    tenant = Tenant(models=(allowed,))
    assert {name for name in names if may_use(tenant, [ENTRIES, ModelList()], name)} == asked
    assert may_use(Tenant(), [ENTRIES], "anything")


def test_a_name_that_replicas_use_for_different_models_needs_all_of_them() -> None:
    other = ModelList([{"id": "llama", "root": "llama"}, {"id": "qwen", "root": "llama"}])
    assert not may_use(Tenant(models=(QWEN,)), [ENTRIES, other], "qwen")
    assert may_use(Tenant(models=(QWEN, "llama")), [ENTRIES, other], "qwen")


def test_replicas_are_found_by_every_name() -> None:
    one = Replica(ReplicaSettings("http://a:1"), HealthLimits(3, 5.0, 10.0), models=ENTRIES)
    for name in ("", QWEN, "qwen", "qwen:pirate", "pirate", "mario"):
        assert one.takes(name), name
        assert one.models.is_loaded(name)
    assert not one.takes("legal")
    assert not one.models.is_loaded("other")
