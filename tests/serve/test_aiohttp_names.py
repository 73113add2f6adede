"""The private names of aiohttp that `serve/http/connection.py` uses, and the versions that have them."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web, web_protocol
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OWNER = ROOT / "millrace" / "serve" / "http" / "connection.py"
NAMES: list[tuple[object, str]] = [
    (web_protocol.RequestHandler, "_messages"),
    (web_protocol.RequestHandler, "_request_count"),
    (web_protocol.RequestHandler, "_drain_helper"),
    (web_protocol, "_ErrInfo"),
    (web.AppRunner, "_make_server"),
]
INSTANCE_NAMES: list[tuple[type, str]] = [
    (web.Server, "_loop"),
    (web.Server, "_kwargs"),
    (web.StreamResponse, "_keep_alive"),
]
PUBLIC_SINCE_3_14: list[tuple[object, str]] = [(web_protocol.RequestHandler, "writing_paused"), (web, "RequestKey")]
REMEDY = f"serve/http/connection.py needs it: adapt that file, or the bound of aiohttp in {ROOT / 'pyproject.toml'}."


@pytest.mark.parametrize(("owner", "name"), [*NAMES, *PUBLIC_SINCE_3_14], ids=lambda value: str(value)[-40:])
def test_aiohttp_has_the_name(owner: object, name: str) -> None:
    assert hasattr(owner, name), f"aiohttp {aiohttp.__version__} has no {owner}.{name}. {REMEDY}"


@pytest.mark.parametrize(("owner", "name"), INSTANCE_NAMES, ids=lambda value: str(value)[-40:])
def test_aiohttp_sets_the_attribute(owner: type, name: str) -> None:
    assert f"self.{name}" in inspect.getsource(owner), (
        f"aiohttp {aiohttp.__version__} does not set {owner.__name__}.{name}. {REMEDY}"
    )


def test_the_installed_version_is_within_the_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [bound] = [found for found in map(Requirement, project["dependencies"]) if found.name == "aiohttp"]
    assert aiohttp.__version__ in bound.specifier, (
        f"aiohttp {aiohttp.__version__} is installed, but pyproject.toml asks for {bound}. Its private names differ"
        " between minor versions: check serve/http/connection.py before the bound is changed."
    )


def test_no_other_file_uses_private_names_of_aiohttp() -> None:
    names = {name for _, name in (*NAMES, *INSTANCE_NAMES)} - {"_loop", "_messages", "_keep_alive", "_kwargs"}
    names |= {"_paused", "protocol._", "transport._", "request._"}
    for path in sorted((ROOT / "millrace" / "serve").rglob("*.py")):
        if path != OWNER:
            text = path.read_text()
            used = [name for name in names if f".{name}" in text or f" {name}," in text]
            assert not used, f"{path} uses {used}; {OWNER.name} should own it."
