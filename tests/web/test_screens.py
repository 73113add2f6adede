"""Pictures of every page on a desktop, on a phone and in the dark, for people to look at; and what a program can check
of them: nothing scrolls sideways, nothing failed, every control has a name.

The pictures are in pytest's temporary folder: `pytest tests/web/test_screens.py --basetemp=/tmp/screens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serve.front_under_test import Front, running_front
from web.test_dashboard import make_busy
from web.watched import DESKTOP, PHONE, answering, has_no_sideways_scroll, open_page, watched_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.live

TEXT = """Both lists are sorted, so walk through them **together** and always take the smaller head. That is linear:
each element is looked at once.

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    \"\"\"Merge two sorted lists.\"\"\"
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:  # Equal elements keep their order.
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
```

### How it compares

| approach | time | memory | stable |
| --- | --- | ---: | :---: |
| `merge` above | O(n + m) | n + m | yes |
| `sorted(left + right)` | O((n + m) log(n + m)) | n + m | yes |
| `heapq.merge` | O(n + m) | 1 | yes |

1. Prefer `heapq.merge` for streams.
2. Prefer `sorted` for short lists: Timsort finds the two runs.
   - It is written in C.
   - It needs no code of yours.

> Measure before you choose.

A word that is too long: Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaftsbeitrag.
"""
SCREENS: dict[str, dict[str, Any]] = {
    "desktop": DESKTOP,
    "phone": PHONE,
    "dark": {**DESKTOP, "color_scheme": "dark"},
    "phone-dark": {**PHONE, "color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(answering({}, TEXT)) as running:
        yield running


def playground(page: Page, front: Front) -> None:
    open_page(page, front)
    page.fill("#input", "How do I merge two sorted lists in Python?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant[aria-busy=false] table")


def dashboard(page: Page, front: Front) -> None:
    make_busy(page)
    open_page(page, front, "/dashboard")
    page.wait_for_selector("#requests tr")


def docs(page: Page, front: Front) -> None:
    open_page(page, front, "/docs")
    page.wait_for_selector("#openapi")


@pytest.mark.parametrize("show", [playground, dashboard, docs], ids=lambda show: show.__name__)
@pytest.mark.parametrize("screen", SCREENS)
def test_screen(browser: Browser, front: Front, tmp_path: Path, screen: str, show: Any) -> None:
    with watched_page(browser, front.url, **SCREENS[screen]) as page:
        show(page, front)
        picture = tmp_path / f"{show.__name__}-{screen}.png"
        page.screenshot(path=picture, full_page=show is dashboard)
        assert picture.stat().st_size > 10_000
        assert has_no_sideways_scroll(page)
        nameless = """() => [...document.querySelectorAll("button, input, select, textarea, a, canvas")].filter(one =>
            one.checkVisibility() && !(one.ariaLabel || one.labels?.length || one.textContent.trim() || one.title))
            .map(one => one.outerHTML.slice(0, 80))"""
        assert page.evaluate(nameless) == []
