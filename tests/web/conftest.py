"""One Chromium for each file of browser tests. They are skipped where Playwright or Chromium is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from serve.front_under_test import running_front, saying

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed after each file: while it runs, this thread has a running event loop, so `asyncio.run` fails."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as running:
        # Containers seldom allow Chromium's own sandbox; the pages under test are ours.
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_of_modules(browser: Browser) -> Iterator[Page]:
    """A page of the server from which a test imports single modules."""
    with running_front(saying("Hello")) as front:
        page = browser.new_page()
        page.goto(front.url + "/docs")
        yield page
        page.close()
