"""Deque's axe finds nothing on any page: light and dark, on a desktop and a phone, empty and in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from serve.front_under_test import Front, running_front
from web.test_dashboard import make_busy
from web.test_screens import SCREENS, TEXT, playground
from web.watched import answering, open_page, watched_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.live

axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
SCRIPT = Path(next(iter(axe.__path__))) / "axe.min.js"
FIND = """async rules => (await axe.run({ rules })).violations.map(
    one => `${one.impact} ${one.id}: ${one.nodes.map(node => node.html.slice(0, 120)).join(" | ")}`)"""


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(answering({"JSON": '{"a": 1}'}, TEXT)) as running:
        yield running


def empty(page: Page, front: Front) -> None:
    open_page(page, front)
    page.wait_for_selector(".starters")


def settings(page: Page, front: Front) -> None:
    open_page(page, front)
    if not page.is_visible("#set-format"):
        page.click("#show-settings")
    page.select_option("#set-format", "json_schema")
    page.check("text=Offer tools to the model")
    page.fill("#set-tools", "[")
    page.wait_for_selector(".verdict.bad")


def dashboard(page: Page, front: Front) -> None:
    make_busy(page)
    open_page(page, front, "/dashboard")
    page.wait_for_selector("#requests tr")


def one_request(page: Page, front: Front) -> None:
    dashboard(page, front)
    page.click("#requests .id >> nth=0")
    page.wait_for_selector("dialog[open] .timeline")


def docs(page: Page, front: Front) -> None:
    open_page(page, front, "/docs")
    page.wait_for_selector("#openapi")


SHOWN = [empty, playground, settings, dashboard, one_request, docs]


@pytest.mark.parametrize("show", SHOWN, ids=lambda show: show.__name__)
@pytest.mark.parametrize("screen", ["desktop", "phone-dark"])
def test_axe_finds_nothing(browser: Browser, front: Front, screen: str, show: Callable[[Page, Front], None]) -> None:
    with watched_page(browser, front.url, **SCREENS[screen]) as page:
        show(page, front)
        page.evaluate(SCRIPT.read_text(encoding="utf-8"))
        # The headings inside an answer are the model's.
        rules = {"heading-order": {"enabled": show is not playground}}
        found = page.evaluate(FIND, rules)
        assert not found, "\n".join(found)
