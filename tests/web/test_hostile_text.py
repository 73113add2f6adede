"""Nothing that a model writes runs, loads or navigates; hostile Markdown takes linear work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from serve.front_under_test import running_front
from web.watched import answering, open_page, watched_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.live

HOSTILE = """<script>window.ran = 1</script>
<img src=x onerror="window.ran = 2">
<iframe src="https://evil.example/frame"></iframe>
<style>body { display: none }</style>
<svg onload="window.ran = 3"><a xlink:href="javascript:window.ran=4">x</a></svg>

![pixel](https://evil.example/pixel.png) ![data](data:image/svg+xml;base64,PHN2Zy8+)
[click](javascript:window.ran=5) [click](JaVa\tScRiPt:window.ran=6) [click](data:text/html,<script>1</script>)
[click](vbscript:x) [click](//evil.example/x) [click](/v1/files) [good](https://good.example/a?b=1)
<javascript:window.ran=7> <https://good.example/b>

- [x](javascript:alert(1)) `<script>` **<b onclick=alert(1)>bold</b>**

| <script>window.ran = 8</script> | b |
| --- | --- |
| <img src=x onerror=alert(2)> | [x](javascript:alert(3)) |

```html"><img src=x onerror=alert(4)>
<script>window.ran = 9</script>
```
"""
SLOW: list[Callable[[int], str]] = [
    lambda size: "*" * size,
    lambda size: "[" * size,
    lambda size: "`" * (size // 2 - 1) + " `" * (size // 4),
    lambda size: "> " * (size // 4) + "x",
    lambda size: "_a" * (size // 2),
    lambda size: "![](" * (size // 4),
    lambda size: "|" * size + "\n" + "|-" * (size // 2),
    lambda size: "- " * (size // 2),
    lambda size: "  " * (size // 2) + "- x",
    lambda size: "<http://" * (size // 5),
    lambda size: "**a" * (size // 2),
    lambda size: "\\" * (size + 1),
]
"""Texts of about `size` characters on which careless parsers take quadratic time."""


def test_nothing_in_an_answer_runs_or_loads(browser: Browser) -> None:
    # At the end, `watched_page` fails if a dialog opened or another host was asked for anything.
    with running_front(answering({}, HOSTILE)) as front, watched_page(browser, front.url) as page:
        open_page(page, front)
        page.fill("#input", "Attack")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant[aria-busy=false] .markdown figure")
        message = page.locator(".message.assistant")
        assert message.locator("script, iframe, img, style, object, embed, form, svg:not(.icon)").count() == 0
        links = message.locator(".markdown a").evaluate_all("all => all.map(one => one.href)")
        assert links == [
            "https://evil.example/frame",  # A bare address in the text.
            "https://evil.example/pixel.png",
            "https://good.example/a?b=1",
            "https://good.example/b",
        ], "images of other hosts become links; other schemes and relative addresses become text"
        assert page.locator(".markdown a").first.get_attribute("rel") == "noopener noreferrer nofollow"
        handlers = message.evaluate("node => [...node.querySelectorAll('*')].flatMap(one => one.getAttributeNames())")
        assert not [name for name in handlers if name.startswith("on") or name == "style"]
        for shown in ("<script>window.ran = 1</script>", "onerror=", "javascript:window.ran=7"):
            assert shown in message.inner_text(), "hostile text stays visible as text"
        assert page.evaluate("window.ran === undefined")
        # The same text as a message of the user and as a title, after a reload from storage.
        page.fill("#input", HOSTILE)
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant[aria-busy=false] >> nth=1")
        page.reload()
        page.wait_for_selector(".message.user >> nth=1")
        assert page.evaluate("window.ran === undefined")


def test_the_policy_stops_what_a_mistake_would_let_through(browser: Browser) -> None:
    blocked = ("Content Security Policy", "Trusted")
    with running_front(answering({}, "ok")) as front, watched_page(browser, front.url, allowed_errors=blocked) as page:
        open_page(page, front)
        attempt = (
            "text => { try { document.body.innerHTML = text; return 'set'; } catch (error) { return error.name; } }"
        )
        assert page.evaluate(attempt, "<img src=x onerror='window.ran = 1'>") == "TypeError"
        page.evaluate(
            """() => {
                const one = document.createElement("script");
                try { one.text = "window.ran = 1"; } catch { /* Refused already here. */ }
                document.body.append(one);
            }"""
        )
        assert page.evaluate("window.ran === undefined")
        is_loaded = """src => new Promise(done => {
            const one = new Image();
            one.onload = () => done(true);
            one.onerror = () => done(false);
            one.src = src;
        })"""
        pixel = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
        assert page.evaluate(is_loaded, pixel) is False


@pytest.fixture(scope="module")
def num_blocks_run(browser: Browser) -> Iterator[Callable[[str], int]]:
    """How often blocks of code of the renderer run for a text, as Chromium counts them."""
    with running_front(answering({}, "ok")) as front:
        page = browser.new_page()
        page.goto(front.url + "/docs")
        session = page.context.new_cdp_session(page)
        session.send("Profiler.enable")
        session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})

        def run(text: str) -> int:
            session.send("Profiler.takePreciseCoverage")  # Counting begins anew.
            page.evaluate(
                """async text => {
                    const { renderMarkdown } = await import("/web/common/markdown.js");
                    renderMarkdown(document.createElement("div"), text);
                }""",
                text,
            )
            scripts = session.send("Profiler.takePreciseCoverage")["result"]
            own = [script for script in scripts if script["url"].endswith("/markdown.js")]
            functions = [function for script in own for function in script["functions"]]
            return sum(block["count"] for function in functions for block in function["ranges"])

        yield run
        page.close()


@pytest.mark.parametrize("text_of_size", SLOW, ids=lambda text_of_size: repr(text_of_size(8)))
def test_work_grows_no_faster_than_hostile_markdown(
    num_blocks_run: Callable[[str], int], text_of_size: Callable[[int], str]
) -> None:
    small, large = (num_blocks_run(text_of_size(size)) for size in (4_000, 8_000))
    assert 0 < large < 2.5 * small + 400, "twice the text takes about twice the work"
