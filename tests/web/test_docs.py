"""The API documentation in a real browser: every endpoint is there; "try it" works with a key, a stream, a phone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from serve.front_under_test import MODEL, endless, running_front
from serve.wire import get
from web.watched import PHONE, answering, has_no_sideways_scroll, open_page, watched_page

from millrace.config import Config, replace
from millrace.serve.tenancy.keyring import Keyring, digest_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.live

CHAT = "#createChatCompletion"


def test_try_it_with_a_key_and_every_endpoint(browser: Browser, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.acme]\nkeys = ["sha256:{digest_of("secret-key").hex()}"]\n')
    config = replace(Config(), server__port=0, server__keys_file=str(keys))
    with running_front(answering({}, "Hello there"), config=config) as front:
        front.state.keyring = Keyring(keys)
        with watched_page(browser, front.url, allowed_errors=("401",)) as page:
            open_page(page, front, "/docs")
            described = get(front.port, "/openapi.json").json["paths"]
            page.wait_for_selector("#openapi")
            assert page.locator(".operation h2").first.inner_text().split() == ["POST", "/v1/chat/completions"]
            playwright.expect(page.locator(".operation")).to_have_count(sum(map(len, described.values())))
            page.click(f"{CHAT} button:has-text('Send')")
            page.wait_for_selector("dialog[open]:has-text('requires a key')")
            page.fill("dialog[open] input", "secret-key")
            page.keyboard.press("Enter")
            example = page.locator(f"{CHAT} textarea")
            playwright.expect(example).to_have_value(re.compile(f'"model": "{MODEL}"'))
            page.click(f"{CHAT} button:has-text('Send')")
            page.wait_for_selector(f"{CHAT} .answer .pill.good >> text=200")
            assert json.loads(page.locator(f"{CHAT} .answer pre").inner_text())["choices"][0]["message"]["content"]
            page.click("#retrieveModel summary:has-text('Try it')")
            page.fill("#retrieveModel [aria-label=model]", MODEL)
            page.click("#retrieveModel button:has-text('Send')")
            page.wait_for_selector("#retrieveModel .answer .pill.good")
            page.fill("#filter", "batches")
            found = [path for path, methods in described.items() if "batches" in path for _ in methods]
            playwright.expect(page.locator("#index a:visible")).to_have_count(len(found))


def test_a_stream_arrives_as_it_is_written_and_stops_on_a_phone(browser: Browser) -> None:
    with running_front(endless, step_s=0.01) as front, watched_page(browser, front.url, **PHONE) as page:
        open_page(page, front, "/docs")
        page.wait_for_selector("#openapi")
        assert page.is_visible(f"{CHAT} h2"), "the index must not hide the documentation"
        assert not page.is_visible("#index")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on"}], "stream": True}
        page.fill(f"{CHAT} textarea", json.dumps(body))
        page.tap(f"{CHAT} button:has-text('Send')")
        page.wait_for_selector(f"{CHAT} .answer pre:has-text('data: {{')")
        page.tap(f"{CHAT} button:has-text('Stop')")
        page.wait_for_selector(f"{CHAT} .answer .pill.bad >> text=stopped")
        page.tap(f"{CHAT} summary:has-text('ChatRequest')")
        page.wait_for_selector(f"{CHAT} td >> text=temperature")
        assert has_no_sideways_scroll(page)
        page.tap("#contents summary")
        page.tap("#index a >> nth=2")
        page.wait_for_selector("#index", state="hidden")
