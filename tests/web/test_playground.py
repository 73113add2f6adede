"""The playground in a real browser, against a real front with a scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.served import wait_until
from serve.front_under_test import END, MODEL, Front, endless, running_front
from web.watched import PHONE, answering, event_stream, has_no_sideways_scroll, open_page, prompt_of, watched_page

from millrace.config import Config, replace
from millrace.serve.tenancy.keyring import Keyring, digest_of
from millrace.text.chat.template import ChatTemplate

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.live

expect = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed").expect
ANSWER = "## Rivers\n\nThe **Rhine** and the *Elbe*:\n\n1. one\n2. two\n\n```python\nprint('hi')  # shown\n```\n"
DONE = ".message.assistant[aria-busy=false]"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(answering({"JSON": '{"a": 1}'}, ANSWER), step_s=0.001) as running:
        yield running


def ask(page: Page, text: str, number: int = 0) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{DONE} >> nth={number}")


def describe(page: Page, **facts: Any) -> None:
    """What the server says of its model."""
    whole = {"id": MODEL, "object": "model", "capabilities": ["completion", "chat", "tools"], "sampling": {}, **facts}
    page.route(f"**/v1/models/{MODEL}", lambda route: route.fulfill(json=whole))


def test_chat_branches_and_saving(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        open_page(page, front)
        page.fill("#input", "line")
        page.keyboard.press("Shift+Enter")
        assert page.input_value("#input") == "line\n"
        ask(page, "Tell me")
        answer = page.locator(DONE)
        assert answer.locator("h4").inner_text() == "Rivers"
        assert answer.locator("strong, em, ol > li").all_inner_texts() == ["Rhine", "Elbe", "one", "two"]
        assert answer.locator("pre .hl-comment").inner_text() == "# shown"
        stats = answer.locator(".stats").inner_text()
        assert "TTFT" in stats
        assert "tok/s" in stats
        page.click("[aria-label='Regenerate as a new branch']")
        page.wait_for_selector("text=2/2")
        page.click("[aria-label='Previous branch']")
        page.wait_for_selector("text=1/2")
        page.hover(".message.user")
        page.click("[aria-label='Edit and send as a new branch']")
        page.fill(".editor textarea", "Tell me more")
        page.keyboard.press("Enter")
        page.wait_for_selector(f".message.user:has-text('Tell me more') ~ {DONE}")
        assert "[user]Tell me more" in prompt_of(front.engine.received[-1])
        assert "[user]Tell me\n" not in prompt_of(front.engine.received[-1])
        page.reload()
        page.wait_for_selector(".message.user:has-text('Tell me more')")
        page.click("[aria-label='Previous branch'] >> nth=0")
        page.wait_for_selector(".message.user .bubble >> text='Tell me'")
        expect(page.locator("#chat-list li")).to_have_count(1)
        page.click("#new-chat")
        page.wait_for_selector(".empty")
        page.hover("#chat-list li")
        page.click("[aria-label^='Delete the chat']")
        page.wait_for_function("!Object.keys(localStorage).some(one => one.startsWith('millrace.chat.'))")
        page.click(".toast >> text=Undo")
        page.click(".chat-name")
        page.wait_for_selector(".message.user .bubble >> text='Tell me'")
        page.reload()
        page.wait_for_selector(".message.user .bubble >> text='Tell me'")


def test_stop_and_errors(browser: Browser) -> None:
    running = running_front(endless, step_s=0.005)
    with running as front, watched_page(browser, front.url, allowed_errors=("400",)) as page:
        open_page(page, front)
        page.fill("#input", "Go on")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant p:text-matches('[a-z]{20}')")
        assert page.get_attribute("#send", "aria-label") == "Stop"
        page.keyboard.press("Escape")
        page.wait_for_selector(".notice:has-text('Stopped.')")
        page.wait_for_selector("#send[aria-label=Send]")
        page.fill("#set-extra", '{"nonsense": 1}')
        page.fill("#input", "Again")
        page.keyboard.press("Enter")
        page.wait_for_selector(".error-card:has-text('nonsense')")
        page.fill("#set-extra", "{")
        page.click(".error-card >> text=Try again")
        page.wait_for_selector(".error-card:has-text('not valid JSON')")


def test_buttons_stay_while_an_answer_streams(browser: Browser) -> None:
    """A click is lost if its button is replaced between press and release."""
    with running_front(endless, step_s=0.005) as front, watched_page(browser, front.url) as page:
        open_page(page, front)
        page.fill("#input", "Go on")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant p:text-matches('[a-z]{20}')")
        page.keyboard.press("Escape")
        page.wait_for_selector(".notice:has-text('Stopped.')")
        page.click("[aria-label='Regenerate as a new branch']")
        button = page.wait_for_selector("[aria-label='Previous branch']")
        page.wait_for_selector(".message.assistant p:text-matches('[a-z]{20}')")
        assert button is not None
        assert button.evaluate("node => node.isConnected")
        button.click()
        page.wait_for_selector("text=1/2")


def test_settings_reach_the_engine_and_code_repeats_them(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        open_page(page, front)
        page.fill("#set-system", "Be brief.")
        page.fill("#set-temperature", "0.5")
        page.fill("#set-max_tokens", "7")
        page.fill("#set-seed", "11")
        ask(page, "Hello" + " word" * 200)
        got = front.engine.received[-1]
        assert (got.params.temperature, got.params.max_tokens, got.params.seed) == (0.5, 7, 11)
        assert prompt_of(got).startswith("[system]Be brief.\n[user]Hello")
        page.wait_for_selector(".notice:has-text('limit of tokens')")
        page.click("#code")
        code = page.locator("dialog[open] pre")
        assert page.locator("dialog[open]").evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")
        assert f"{front.url}/v1/chat/completions" in code.inner_text()
        assert json.loads(code.inner_text().partition("-d '")[2].rstrip("'"))["temperature"] == 0.5
        page.click("dialog[open] >> text=Python")
        expect(code).to_contain_text("from openai import OpenAI")
        compile(code.inner_text(), "snippet", "exec")
        page.keyboard.press("Escape")
        page.select_option("#set-format", "json_object")
        page.fill("#set-max_tokens", "")
        ask(page, "As JSON", 1)


def test_nothing_is_typed_into_a_form_that_is_built_again(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        held: list[Route] = []
        page.route("**/v1/models", lambda route: held.extend([route]))
        page.goto(front.url)
        expect(page.locator("#set-system")).to_be_disabled()
        wait_until(lambda: page.evaluate("true") and bool(held), "the page asks for the models", 60.0)
        held[0].continue_()
        page.fill("#set-system", "Be brief.")
        page.unroute("**/v1/models")
        page.evaluate("() => document.getElementById('set-system').isSame = true")
        for _ in range(3):  # As when a key was entered, or the server was started again.
            with page.expect_response(f"**/v1/models/{MODEL}"):
                page.evaluate("dispatchEvent(new Event('millrace:key'))")
        assert page.evaluate("() => document.getElementById('set-system').isSame")
        assert page.input_value("#set-system") == "Be brief."


def test_token_probabilities_and_branching_from_a_token(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        open_page(page, front)
        page.check("text=Token probabilities")
        ask(page, "Hello")
        tokens = page.locator(f"{DONE} .token")
        expect(tokens.nth(len(ANSWER) - 1)).to_be_attached()
        tokens.nth(3).hover()
        page.wait_for_selector(".popover:has-text('logprob')")
        tokens.nth(3).click()
        page.locator(".popover button:not(:disabled)").first.click()
        page.wait_for_selector("text=2/2")
        assert prompt_of(front.engine.received[-1]).rpartition("[assistant]")[2].startswith(ANSWER[:3])
        expect(page.locator(".tokens .prefix")).to_have_text(re.compile(f"^{re.escape(ANSWER[:3])}"))
        page.click("[aria-label='Previous branch']")
        page.focus(".tokens")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".token.current")).to_have_text(ANSWER[1])
        page.click("[aria-label='Show as text']")
        page.wait_for_selector(f"{DONE} h4")


def test_two_sides(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url) as page:
        open_page(page, front)
        page.click("#compare")
        page.fill("#set-temperature", "0.1")
        ask(page, "Both", 1)
        assert {one.params.temperature for one in front.engine.received[-2:]} == {0.1, 1.0}
        page.reload()
        page.wait_for_selector(f"{DONE} >> nth=1")
        page.click("[aria-label='Close this side'] >> nth=1")
        expect(page.locator(".pane")).to_have_count(1)


def test_tools_and_reasoning_in_openai_shape(browser: Browser, front: Front) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"ci'}}
    rest = {"index": 0, "function": {"arguments": 'ty": "Bonn"}'}}
    deltas = ({"reasoning_content": "I need it."}, {"tool_calls": [call]}, {"tool_calls": [rest]})
    asked = event_stream(*deltas, finish="tool_calls")
    bodies: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        text = asked if len(bodies) == 1 else event_stream({"content": "It is sunny."})
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    with watched_page(browser, front.url) as page:
        open_page(page, front)
        page.check("text=Offer tools to the model")
        page.route("**/v1/chat/completions", answer)
        ask(page, "Weather?")
        assert '"city": "Bonn"' in page.locator(".call pre").inner_text()
        assert page.locator(".reasoning .markdown").text_content() == "I need it."
        page.fill("[aria-label='Result of get_weather']", '{"sky": "clear"}')
        page.click("text=Send result")
        page.wait_for_selector("text=It is sunny.")
        first, second = bodies
        assert first["tools"][0]["function"]["name"] == "get_weather"
        roles = [message["role"] for message in second["messages"]]
        assert roles == ["user", "assistant", "tool"]
        assert second["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear"}'}


def test_a_key_stays_in_its_tab(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.acme]\nkeys = ["sha256:{digest_of("secret-key").hex()}"]\n')
    config = replace(Config(), server__port=0, server__keys_file=str(keys))
    with running_front(answering({}, "Hello"), config=config) as front:
        front.state.keyring = Keyring(keys)
        with watched_page(browser, front.url, allowed_errors=("401",)) as page:
            open_page(page, front)
            page.wait_for_selector("dialog[open]:has-text('requires a key')")
            page.fill("dialog[open] input", "secret-key")
            page.keyboard.press("Enter")
            page.wait_for_selector(f"#set-model option[value={MODEL}]", state="attached")
            ask(page, "Hi")
            assert page.evaluate("sessionStorage.getItem('millrace.key')") == "secret-key"
            assert "secret-key" not in page.evaluate("JSON.stringify(localStorage)")
            page.click("#code")
            assert "secret-key" not in page.locator("dialog[open]").inner_text()
            other = page.context.new_page()
            other.goto(front.url)
            other.wait_for_selector("dialog[open]:has-text('requires a key')")


def test_on_a_phone(browser: Browser, front: Front) -> None:
    with watched_page(browser, front.url, **PHONE) as page:
        open_page(page, front)
        assert has_no_sideways_scroll(page)
        page.tap("#show-settings")
        page.wait_for_selector("#settings.open")
        page.fill("#set-max_tokens", "500")
        page.tap("#close-settings")
        page.wait_for_selector("#settings", state="hidden")
        ask(page, "Hello " + "x" * 300)
        assert has_no_sideways_scroll(page)
        page.tap("#show-chats")
        page.wait_for_selector("#chats.open #chat-list li")


def test_images_only_where_the_model_takes_them(browser: Browser, front: Front, tmp_path: Path) -> None:
    pixel = bytes.fromhex("47494638396101000100800000000000ffffff21f90401000000002c00000000010001000002024401003b")
    file = tmp_path / "pixel.gif"
    file.write_bytes(pixel)
    with watched_page(browser, front.url) as page:
        open_page(page, front)
        page.wait_for_selector(f"#set-model option[value={MODEL}]", state="attached")
        assert not page.is_visible("#attach")
    bodies: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        route.fulfill(status=200, content_type="text/event-stream", body=event_stream({"content": "A pixel."}))

    with watched_page(browser, front.url) as page:
        describe(page, capabilities=["completion", "chat", "vision"])
        page.route("**/v1/chat/completions", answer)
        open_page(page, front)
        page.wait_for_selector("#attach")
        page.set_input_files("#file", file)
        page.wait_for_selector("#attached img")
        ask(page, "What is this?")
        page.wait_for_selector(".message.user img")
        [text, image] = bodies[0]["messages"][0]["content"]
        assert text == {"type": "text", "text": "What is this?"}
        assert image["image_url"]["url"].startswith("data:image/gif;base64,R0lGOD")


def test_several_models(browser: Browser, front: Front) -> None:
    names = {MODEL: MODEL, "an-alias": MODEL, "other-model": "other-model"}
    listed = [{"id": name, "object": "model", "root": root} for name, root in names.items()]
    models = {"object": "list", "data": listed}
    with watched_page(browser, front.url, allowed_errors=("404",)) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        open_page(page, front)
        page.wait_for_selector("#set-model option[value=other-model]", state="attached")
        page.select_option("#set-model", "other-model")
        expect(page.locator("#model-name")).to_have_text("other-model")
        page.select_option("#set-model", MODEL)
        expect(page.locator("#model-name")).to_have_text(MODEL)
        assert page.locator("#set-model option").all_inner_texts() == [MODEL, "other-model"], "an alias is no model"
        page.click("#compare")
        assert page.evaluate(
            "[...document.querySelectorAll('.empty')].every(one => one.scrollWidth <= one.clientWidth)"
        )
        expect(page.locator(".pane-name strong")).to_have_text([MODEL, "other-model"])
        ask(page, "Both", 1)
        page.wait_for_selector(".pane:nth-child(2) .error-card:has-text('other-model')")
        assert page.locator(".pane:nth-child(1) .error-card").count() == 0


def test_nothing_is_claimed_of_models_that_are_not_described_yet(browser: Browser, front: Front) -> None:
    held: list[Route] = []
    with watched_page(browser, front.url) as page:
        page.route(f"**/v1/models/{MODEL}", lambda route: held.extend([route]))
        page.goto(front.url)
        page.wait_for_selector("#status.good")
        expect(page.locator(".empty h2")).to_be_visible()
        assert page.locator(".starters button").count() == 0
        assert page.get_attribute("#set-temperature", "placeholder") == ""
        assert page.is_disabled("#compare"), "it would compare nothing, or the model with itself"
        while not held:
            page.wait_for_timeout(20)
        facts = {"id": MODEL, "object": "model", "capabilities": ["chat"], "sampling": {"temperature": 0.2}}
        held[0].fulfill(json=facts)
        expect(page.locator(".starters button")).to_have_count(4)
        expect(page.locator("#set-temperature")).to_have_attribute("placeholder", "0.2")
        page.click("#compare")
        expect(page.locator(".pane-name strong")).to_have_text([MODEL, MODEL])


def test_placeholders_show_the_values_in_force_and_controls_without_effect_say_why(
    browser: Browser, front: Front
) -> None:
    with watched_page(browser, front.url) as page:
        describe(page, sampling={"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1})
        open_page(page, front)
        expect(page.locator("#set-temperature")).to_have_attribute("placeholder", "0.2")
        expect(page.locator("#set-top_p")).to_have_attribute("placeholder", "0.9")
        expect(page.locator("#set-repetition_penalty")).to_have_attribute("placeholder", "1.1")
        expect(page.locator("#set-top_k")).to_have_attribute("placeholder", "off")
        expect(page.locator(".why")).to_contain_text("does not reason")
        assert page.locator("#set-reasoning").count() == 0
        page.fill("#set-temperature", "0.7")
        page.click("text=Reset the settings")
        expect(page.locator("#set-temperature")).to_have_value("")
        describe(page, capabilities=["completion", "chat", "tools", "thinking"])
        page.reload()
        page.wait_for_selector("#set-reasoning")


def test_a_small_model_gets_starters_it_can_answer_with_a_cap_and_a_better_model(browser: Browser) -> None:
    with running_front(endless, step_s=0.0005) as front, watched_page(browser, front.url) as page:
        describe(page, suggestion={"name": "qwen3-4b", "download_bytes": 2_450_000_000})
        open_page(page, front)
        expect(page.locator(".nudge")).to_contain_text(
            "millrace serve qwen3-4b, a download of 2.5 GB, fits this machine"
        )
        page.click("text=What is the capital of France?")
        page.wait_for_selector(".notice:has-text('limit of tokens')")
        assert front.engine.received[-1].params.max_tokens == 300
        page.fill("#input", "Go on")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.running")
        assert front.engine.received[-1].params.max_tokens != 300, "only starters are capped"


def test_a_schema_is_prefilled_checked_while_typing_and_the_answer_judged(browser: Browser) -> None:
    answers = {"Wrong": '{"city": "Bonn"}'}
    script = answering(answers, '{"city":"Bonn","country":"Germany","population":330000}')
    with running_front(script) as front, watched_page(browser, front.url) as page:
        open_page(page, front)
        page.select_option("#set-format", "json_schema")
        assert json.loads(page.input_value("#set-schema"))["required"] == ["city", "country", "population"]
        expect(page.locator("#verdict-schema")).to_have_text("Valid")
        whole = page.input_value("#set-schema")
        page.fill("#set-schema", '{"type": ')
        expect(page.locator("#verdict-schema")).to_contain_text("not valid JSON")
        expect(page.locator("#send")).to_be_disabled()
        page.fill("#input", "Which city?")
        page.keyboard.press("Enter")
        assert page.input_value("#input") == "Which city?", "the message is not spent"
        page.fill("#set-schema", whole)
        expect(page.locator("#send")).to_be_enabled()
        page.focus("#input")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"{DONE} .notice.good:has-text('Matches your schema')")
        assert page.locator(f"{DONE} pre").inner_text().startswith('{\n  "city": "Bonn",\n')
        ask(page, "Wrong", 1)
        page.wait_for_selector(".notice.bad:has-text('answer.country is missing')")
        page.check("text=Offer tools to the model")
        assert json.loads(page.input_value("#set-tools"))[0]["function"]["name"] == "get_weather"
        page.fill("#set-tools", "[{}]")
        expect(page.locator("#verdict-tools")).to_contain_text("wrong form")
        expect(page.locator("#send")).to_be_disabled()


def test_a_base_model_continues_text(browser: Browser) -> None:
    running = running_front(lambda request: [*b" and so on.", END], template=ChatTemplate({}, {}))
    with running as front, watched_page(browser, front.url) as page:
        open_page(page, front)
        page.wait_for_selector(".empty:has-text('base model')")
        expect(page.locator("#input")).to_have_attribute("placeholder", "Text to continue")
        expect(page.locator(".why")).to_contain_text("no chat template")
        assert page.locator("#set-system, #set-format, #set-reasoning").count() == 0
        ask(page, "One, two")
        expect(page.locator(f"{DONE} .plain-text")).to_have_text(" and so on.")
        assert prompt_of(front.engine.received[-1]) == "One, two"
        ask(page, " Then three", 1)
        assert prompt_of(front.engine.received[-1]) == "One, two and so on. Then three"
        page.click("#code")
        assert f"{front.url}/v1/completions" in page.locator("dialog[open] pre").inner_text()
