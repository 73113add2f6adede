"""The pages of docs/api, and what is generated in other pages, match the code."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

import millrace
from millrace import errors
from millrace.serve import api_routes
from millrace.serve.describe.routes_absent import ABSENT

ROOT = Path(__file__).parents[2]
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))


def test_generated_parts_match_the_code() -> None:
    written = runpy.run_path(str(ROOT / "tools" / "api_tables.py"))["written"]
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert written(text) == text, f"{page.name}: run python tools/api_tables.py"


def test_python_methods_have_signatures_and_docstrings() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    names = set(millrace.__all__) - {"__version__"}
    assert {name for name in names if f"<!-- members of {name} -->" not in page} == set()
    for kind in (millrace.LLM, millrace.AsyncLLM):
        methods = [name for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"]
        assert [name for name in methods if f"{kind.__name__}.{name}(" not in page] == [], "each has a docstring"


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
