"""One Chromium for each file of browser tests. They are skipped where Playwright or Chromium is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from web.watched import LIMIT_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed after each file: while it runs, this thread has a running event loop, so `asyncio.run` fails."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed")
    playwright.expect.set_options(timeout=LIMIT_MS)
    with playwright.sync_playwright() as running:
        # Containers seldom allow Chromium's own sandbox; the pages under test are ours.
        started = running.chromium.launch(
            executable_path=path, timeout=LIMIT_MS, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()
