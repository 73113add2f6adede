"""docs/api.md matches the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from millrace import errors
from millrace.serve import api_routes
from millrace.serve.describe.routes_absent import ABSENT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_tables_match_the_structs() -> None:
    written = runpy.run_path(str(ROOT / "tools" / "api_tables.py"))["written"]
    assert written(PAGE) == PAGE, "run: python tools/api_tables.py"


@pytest.mark.parametrize("path", sorted({*api_routes.POST, *api_routes.GET, *api_routes.DELETE}))
def test_every_endpoint_is_named(path: str) -> None:
    parts = re.sub(r"\{[a-z_]+(:[^}]+)?\}", "{id}", path).replace("/v1/models/{id}", "/v1/models/{model}")
    head, _, tail = parts.rpartition("{id}")
    assert parts in PAGE or (f"{head}{{id}}" in PAGE and f"…{tail}" in PAGE)


def test_every_error_is_in_the_table() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MillraceError)
    ]
    at_start = (errors.MillraceError, errors.ConfigError, errors.ModelError, errors.MemoryPlanError)
    for kind in kinds:
        if kind not in at_start:
            assert re.search(rf"\| {kind.status} \| `{kind.type}` \|.*{kind.code or ''}", PAGE), kind


def test_absent_routes_are_not_also_present() -> None:
    assert not set(ABSENT) & {*api_routes.POST, *api_routes.GET, *api_routes.DELETE}
