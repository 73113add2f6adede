"""The pages as files and over HTTP: policy, keys, no foreign asset, no markup made of text, no cross-site request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, get, post, request

from millrace.config import Config, replace
from millrace.web.pages import PAGES, PREFIX, ROOT, load_assets

pytestmark = pytest.mark.live

FILES = sorted(file for file in ROOT.rglob("*") if file.is_file())
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Hello")) as running:
        yield running


@pytest.mark.parametrize("path", PAGES)
def test_a_page_allows_nothing_inline_and_nothing_foreign(front: Front, path: str) -> None:
    reply = get(front.port, path)
    assert reply.status == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert reply.headers["x-frame-options"] == "DENY"
    assert reply.headers["x-content-type-options"] == "nosniff"
    html = reply.body.decode()
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son[a-z]+=", html), (
        "needs an exception in the policy"
    )
    for name in re.findall(r'(?:src|href)="(/web/[^"]+)"', html):
        assert get(front.port, name).status == 200, name
    again = request(front.port, "GET", path, headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_files_below_static_only(front: Front) -> None:
    for name in ("/web/../pages.py", "/web/%2e%2e/pages.py", "/web/nothing.js", "/web/common/", "/web//etc/passwd"):
        assert get(front.port, name).status == 404, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_turns_no_text_into_markup_and_names_no_other_host(file: Path) -> None:
    assert file.relative_to(ROOT).as_posix() in load_assets(), "a file that is not served"
    text = file.read_text(encoding="utf-8")
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
    ):
        assert forbidden not in text
    hosts = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}
    assert not hosts
    assert not re.search(r"\burl\(|@import", text), "an asset outside the reviewed list"


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".js"], ids=lambda file: file.name)
def test_every_imported_module_and_name_exists(file: Path) -> None:
    at = dirname(file.relative_to(ROOT).as_posix())
    for names, module in re.findall(
        r'^import \{([^}]+)\} from "([^"]+)";$', file.read_text(encoding="utf-8"), re.MULTILINE
    ):
        target = ROOT / normpath(join(at, module))
        exported = set(
            re.findall(r"export (?:async )?(?:function|const|class) (\w+)", target.read_text(encoding="utf-8"))
        )
        assert {name.strip() for name in names.split(",")} <= exported, (file.name, module)


def test_pages_need_no_key_but_the_api_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    config = replace(Config(), server__port=0, server__keys_file=str(keys))
    with running_front(saying("ok"), config=config) as front:
        from millrace.serve.tenancy.keyring import Keyring

        front.state.keyring = Keyring(keys)
        for path in (*PAGES, PREFIX + "common/dom.js"):
            assert get(front.port, path).status == 200
        assert get(front.port, "/v1/models").status == 401


# ── cross-site requests ───────────────────────────────────────────────────────────────────────────────────────────────
def test_requests_of_other_sites_are_refused(front: Front) -> None:
    own = f"127.0.0.1:{front.port}"
    refused = [
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ]
    for headers in refused:
        reply = post(front.port, CHAT, BODY, headers)
        assert (reply.status, reply.error["code"]) == (403, "cross_site"), headers
        assert request(front.port, "DELETE", "/v1/requests/x", headers=headers).status == 403
    accepted = [
        {},  # Not a browser.
        {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"},
        {"Origin": f"http://{own}"},  # A browser on plain HTTP.
        {"Origin": "https://proxied.example", "X-Forwarded-Host": "proxied.example"},
        {"Sec-Fetch-Site": "none"},
    ]
    for headers in accepted:
        assert post(front.port, CHAT, BODY, headers).status == 200, headers


def test_cors_permits_what_it_names() -> None:
    config = replace(Config(), server__port=0, server__cors_origins="https://a.example")
    with running_front(saying("ok"), config=config) as front:
        cross = {"Sec-Fetch-Site": "cross-site"}
        assert post(front.port, CHAT, BODY, {**cross, "Origin": "https://a.example"}).status == 200
        assert post(front.port, CHAT, BODY, {**cross, "Origin": "https://b.example"}).status == 403
