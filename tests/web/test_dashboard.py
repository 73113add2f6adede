"""The dashboard in a real browser: figures of a real front, views of operator and tenant, one request, many streams."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from serve.front_under_test import MODEL, Front, endless, running_front
from serve.wire import CHAT, get, post, request
from web.figures import busy_requests, busy_stats, cost, explanation, prefix_tree
from web.watched import PHONE, has_no_sideways_scroll, open_page, watched_page

from millrace.config import Config, replace
from millrace.observe.history import FrontCounts, Sample
from millrace.serve.tenancy.keyring import Keyring, digest_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.live

expect = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed").expect
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(endless, step_s=0.01) as running:
        yield running


def answer_with(page: Page, pattern: str, body: dict[str, Any]) -> None:
    page.route(re.compile(pattern), lambda route: route.fulfill(content_type="application/json", body=json.dumps(body)))


def make_busy(page: Page) -> None:
    answer_with(page, r"/v1/stats", busy_stats())
    answer_with(page, r"/v1/cost$", cost())
    answer_with(page, r"/v1/kv/tree", prefix_tree())
    answer_with(page, r"/v1/requests\?", busy_requests())
    answer_with(page, r"/explain$", explanation())


def test_figures_of_a_real_front(browser: Browser, front: Front) -> None:
    post(front.port, CHAT, BODY)
    with watched_page(browser, front.url) as page:
        open_page(page, front, "/dashboard")
        page.wait_for_selector(f"h1 >> text={MODEL}")
        expect(page.locator(".tile:has-text('KV pool in use') strong")).to_have_text("10 %")
        pool = page.locator(".pool canvas")
        expect(pool).to_have_attribute("aria-label", "device: 10 in use, 30 cached, 60 free")
        page.wait_for_selector("text=No request is running.")
        page.select_option("#window", "60")
        page.wait_for_selector(".chart canvas[aria-label^='Time to first token']")


def test_the_prefix_tree_and_what_was_evicted(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url, **PHONE) as page:
        make_busy(page)
        page.goto(front.url + "/dashboard")
        rows = page.locator("#tree-rows tr")
        expect(rows).to_have_count(8)
        assert rows.nth(2).inner_text().split() == ["in", "use", "512", "3", "1", "device"]
        expect(page.locator("#tree-note")).to_contain_text("310 smaller nodes with 41.2k tokens are not shown")
        expect(page.locator("#found-rows tr:has-text('Documents')")).to_contain_text("2.7 %")
        expect(page.locator("#eviction-rows tr")).to_have_count(4)
        pool = page.locator(".pool canvas").first
        expect(pool).to_have_attribute("aria-label", re.compile("6203 in use, 3560 shared, 1480 kept, 10631 cached"))
        assert has_no_sideways_scroll(page)
        tree = page.locator("#tree .table")
        tree.evaluate("one => { one.style.maxHeight = '9rem'; one.scrollTop = 60 }")
        with page.expect_response(re.compile("/v1/kv/tree")):  # The next one, seconds later.
            pass
        expect(rows).to_have_count(8)
        assert tree.evaluate("one => one.scrollTop") == 60


def test_a_tenant_is_not_shown_the_prefix_tree(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        make_busy(page)
        stats = busy_stats()
        stats["view"] = {"tenant": "acme", "is_operator": False}
        answer_with(page, r"/v1/stats", stats)
        page.goto(front.url + "/dashboard")
        page.wait_for_selector("text=View of acme")
        expect(page.locator("#tree")).to_be_hidden()
        pool = page.locator(".pool canvas").first
        expect(pool).to_have_attribute("aria-label", re.compile("9803 in use, 12207 cached"))


def test_objectives_and_cost_of_a_real_front(browser: Browser) -> None:
    config = replace(
        Config(), server__port=0, observe__price_per_hour=2.5, observe__slos="ttft p95 < 500 ms; batch: e2e p90 < 1 min"
    )
    with running_front(endless, config=config) as front, watched_page(browser, front.url) as page:
        page.goto(front.url + "/dashboard")
        page.wait_for_selector("#cost >> text=No work has been measured yet.")
        expect(page.locator(".slo strong")).to_have_text(["ttft p95 < 500 ms", "batch: e2e p90 < 60 s"])
        stats = front.call(front.engine.stats)
        for second in range(8):
            steps = 100 + 10 * second
            work = msgspec.structs.replace(stats, step_no=steps, decode_tokens=4 * steps, device_seconds=0.01 * steps)
            front.state.figures.history.add(Sample(time.time() + second, work, FrontCounts()))
        page.reload()
        page.wait_for_selector("#cost >> text=Per million tokens")
        assert re.search(r"output\s*\$\d+\.\d\d", page.locator("#cost").inner_text())


def test_a_running_request_is_listed_and_cancelled(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        open_page(page, front)
        page.fill("#input", "Go on")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant p")
        board = page.context.new_page()
        board.goto(front.url + "/dashboard")
        board.wait_for_selector("#requests .stage.decode")
        expect(board.locator("#requests tr")).to_have_count(1)
        identity = board.locator("#requests .id").inner_text()
        with board.expect_response(lambda one: one.request.method == "DELETE") as answered:
            board.click(f"[aria-label='Cancel {identity}']")
        assert answered.value.url.endswith(f"/v1/requests/{identity}")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send[aria-label=Send]")


def test_every_panel_of_a_busy_server(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        make_busy(page)
        page.goto(front.url + "/dashboard")
        page.wait_for_selector("text=Operator's view")
        titles = page.locator(".chart:visible h3").all_inner_texts()
        wanted = "Time to first token,Time per output token,Tokens per second,Requests per second,Errors per second"
        wanted += ",Running\\, by class,Waiting\\, by class,KV pool,Prefix hit rate,Host memory,Memory bandwidth in use"
        wanted += ",Compute in use,Draft acceptance,Time of a step,Blocks on the device,Blocks in host memory"
        for title in re.split(r"(?<!\\),", wanted):
            assert title.replace("\\", "") in titles
        expect(page.locator(".none:visible")).to_have_count(0)  # Every chart has data.
        label = page.locator("canvas[aria-label^='Memory bandwidth']").get_attribute("aria-label") or ""
        assert re.search(r"of the machine \d+ %$", label)
        expect(page.locator("#tenant-rows tr")).to_have_count(2)
        expect(page.locator(".slo .pill")).to_have_text(["met", "missed"])
        expect(page.locator("#cost")).to_contain_text("$0.19")
        expect(page.locator("#error-rows")).to_contain_text("quota_exceeded")
        page.click("#requests .id >> nth=0")
        page.wait_for_selector("dialog[open] .timeline .queue")
        assert "It waited 0.412 s" in page.locator("dialog[open]").inner_text()
        assert page.is_visible("#request-cancel")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="hidden")
        assert has_no_sideways_scroll(page)


def test_many_streams_cost_the_page_no_more_than_fifty(browser: Browser, front: Front) -> None:
    """The server aggregates, and the list has a limit."""
    with watched_page(browser, front.url) as page:
        answer_with(page, r"/v1/stats", busy_stats(300))
        answer_with(page, r"/v1/cost$", cost())
        answer_with(page, r"/explain$", explanation())
        asked: list[str] = []
        page.on("request", lambda one: asked.append(one.url))
        answer_with(page, r"/v1/requests\?", busy_requests(50, total=2000))
        page.goto(front.url + "/dashboard")
        page.wait_for_selector("text=The 50 longest running of 2000.")
        expect(page.locator("#requests tr")).to_have_count(50)
        assert all("limit=50" in url for url in asked if "/v1/requests?" in url)
        assert sum("/explain" in url for url in asked) <= 8 * sum("/v1/stats" in url for url in asked)


def test_kept_prompts_are_listed_with_the_tiers_that_hold_them(browser: Browser, front: Front) -> None:
    kept = {"id": "session:boats", "tenant": "acme", "tokens": 96, "expires_in_s": 3600}
    kept |= {"locations": {"device": 32, "host": 48}}
    body = json.dumps({"data": [kept], "used_bytes": 1, "max_bytes": 4})
    with watched_page(browser, front.url) as page:
        page.route("**/v1/cache", lambda route: route.fulfill(body=body, content_type="application/json"))
        page.goto(front.url + "/dashboard")
        page.wait_for_selector("#kept-rows >> text=session:boats")
        assert "32 device, 48 host, 16 evicted" in page.inner_text("#kept-rows")
        assert "25" in page.inner_text("#kept-note")


def test_a_missing_request_and_a_lost_server(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url, allowed_errors=("404", "ERR_FAILED")) as page:
        open_page(page, front, "/dashboard#request=nothing")
        page.wait_for_selector("dialog[open] >> text=Not found")
        page.keyboard.press("Escape")
        page.route("**/v1/stats*", lambda route: route.abort())
        page.wait_for_selector("#problem >> text=cannot be reached")
        page.unroute("**/v1/stats*")
        page.wait_for_selector("#problem", state="hidden")


def test_on_a_phone(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url, **PHONE) as page:
        make_busy(page)
        page.goto(front.url + "/dashboard")
        page.wait_for_selector("text=Operator's view")
        assert has_no_sideways_scroll(page)


# ── views ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_operator_and_tenant_see_what_is_theirs(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    lines = [f'[tenants.{name}]\nkeys = ["sha256:{digest_of("key-" + name).hex()}"]\n' for name in ("acme", "globex")]
    lines.append(f'[tenants.admin]\noperator = true\nkeys = ["sha256:{digest_of("key-admin").hex()}"]\n')
    keys.write_text("".join(lines))
    config = replace(Config(), server__port=0, server__keys_file=str(keys))

    def bearer(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer key-{name}"}

    with running_front(endless, config=config, step_s=0.02) as front:
        front.state.keyring = Keyring(keys)
        with watched_page(browser, front.url, allowed_errors=("401",)) as page:
            page.add_init_script("sessionStorage.setItem('millrace.key', 'key-acme')")
            open_page(page, front)
            page.fill("#input", "Go on")
            page.keyboard.press("Enter")
            page.wait_for_selector(".message.assistant p")
            seen = {
                name: request(front.port, "GET", "/v1/requests?limit=5", headers=bearer(name)).json
                for name in ("acme", "globex", "admin")
            }
            assert {name: listed["total"] for name, listed in seen.items()} == {"acme": 1, "globex": 0, "admin": 1}
            assert seen["admin"]["data"][0]["tenant"] == "acme"
            board = page.context.new_page()
            board.add_init_script("sessionStorage.setItem('millrace.key', 'key-admin')")
            board.goto(front.url + "/dashboard")
            board.wait_for_selector("text=Operator's view")
            board.wait_for_selector("#requests .tenant >> text=acme")
            own = page.context.new_page()
            own.add_init_script("sessionStorage.setItem('millrace.key', 'key-globex')")
            own.goto(front.url + "/dashboard")
            own.wait_for_selector("text=View of globex")
            own.wait_for_selector("text=No request is running.")
        assert get(front.port, "/v1/stats").status == 401
        refused = request(front.port, "GET", "/v1/requests?limit=0", headers=bearer("acme"))
        assert (refused.status, refused.error["param"]) == (400, "limit")


RECORD_LABELS = """const write = CanvasRenderingContext2D.prototype.fillText;
window.labels = {};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const isOfAxis = this.textAlign === "right" && this.textBaseline === "middle";
  if (isOfAxis) window.labels[text] = x - this.measureText(text).width;
  return write.call(this, text, x, y);
};"""


def test_axis_labels_are_whole(browser: Browser, front: Front) -> None:
    busy = busy_stats()
    busy["series"]["ttft_s"] = {name: [0.3 for _ in busy["series"]["time"]] for name in ("p50", "p95", "p99")}
    with watched_page(browser, front.url) as page:
        page.add_init_script(RECORD_LABELS)
        make_busy(page)
        answer_with(page, r"/v1/stats", busy)
        open_page(page, front, "/dashboard")
        page.wait_for_function("'300 ms' in labels && Object.keys(labels).length > 10")
        assert {text: at for text, at in page.evaluate("labels").items() if at < 0} == {}


def test_few_requests_are_points_and_empty_panels_are_folded(browser: Browser) -> None:
    with running_front(endless, step_s=0.01) as quiet, watched_page(browser, quiet.url) as page:
        post(quiet.port, CHAT, BODY)
        open_page(page, quiet, "/dashboard")
        chart = page.locator(".chart", has_text="Time to first token")
        expect(chart.locator("small")).to_have_text("1 measured, each a point")
        found = get(quiet.port, "/v1/stats?window=300&step=5").json["latency"]["ttft_s"]
        assert found["p50"] == found["p99"] == found["points"][0][1]
        values = chart.locator(".legend b").all_inner_texts()
        assert len(values) == 3
        assert len(set(values)) == 1, "every percentile of one request is its own time"
        group = page.locator(".group", has=page.locator("h2", has_text="KV cache"))
        expect(group.locator(".folded")).to_contain_text("Evictions and preemptions per second")
        assert not page.locator(".chart", has_text="Evictions and preemptions").is_visible()
        group.locator("text=Show").click()
        page.locator(".chart", has_text="Evictions and preemptions").wait_for()


def test_running_requests_come_before_the_charts(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        make_busy(page)
        open_page(page, front, "/dashboard")
        page.wait_for_selector("#requests tr")
        assert page.evaluate("document.querySelector('#requests').getBoundingClientRect().top") < 400
        expect(page.locator(".chart", has_text="Wasted tokens").locator(".legend")).to_contain_text("rejected drafts")


def test_the_dashboard_on_a_phone_is_short_and_its_links_are_whole(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url, **PHONE) as page:
        make_busy(page)
        for path in ("/", "/dashboard", "/docs"):
            open_page(page, front, path)
            assert page.evaluate("(nav => nav.scrollWidth <= nav.clientWidth)(document.querySelector('.top nav'))"), (
                path
            )
        open_page(page, front, "/dashboard")
        page.wait_for_selector("#requests tr")
        assert page.locator("details.group[open]").count() == 1
        fits = """input => {
            const context = document.createElement("canvas").getContext("2d"), style = getComputedStyle(input);
            context.font = style.font;
            const room = input.clientWidth - 2 * parseFloat(style.paddingLeft);
            return context.measureText(input.placeholder).width <= room; }"""
        assert page.locator("#find-id").evaluate(fits)
        page.locator("summary", has_text="Throughput").click()
        page.locator(".chart", has_text="Requests per second").wait_for()
        assert has_no_sideways_scroll(page)
