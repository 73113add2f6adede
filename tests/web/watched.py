"""A browser page that records everything it must not do: errors, refused policies, requests to other hosts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from serve.front_under_test import END, Front

from millrace.link.messages import NewRequest, unpack_tokens

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIMIT_MS = 60_000
"""For every wait: generous, because only a defect lasts so long."""
DESKTOP: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}


@contextmanager
def watched_page(browser: Browser, url: str, *, allowed_errors: tuple[str, ...] = (), **options: Any) -> Iterator[Page]:
    """A page in a fresh profile. Fails at the end if something went wrong in it, or if it reached for another host."""
    context = browser.new_context(**{**DESKTOP, **options})
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda one: one.url.startswith((url, "blob:")) or problems.append(f"request to {one.url}"))
    try:
        yield page
        unexpected = [text for text in problems if not any(allowed in text for allowed in allowed_errors)]
        assert not unexpected, unexpected
    finally:
        context.close()


def open_page(page: Page, front: Front, path: str = "/") -> None:
    page.goto(front.url + path)
    page.wait_for_selector("#status.good")


def has_no_sideways_scroll(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def prompt_of(request: NewRequest) -> str:
    return bytes(token for token in unpack_tokens(request.prompt).tolist() if token < 256).decode(errors="replace")


def answering(answers: dict[str, str], otherwise: str) -> Callable[[NewRequest], list[int]]:
    """A script: the answer whose key the last message contains."""

    def script(request: NewRequest) -> list[int]:
        last = prompt_of(request).rpartition("[user]")[2]
        text = next((answer for key, answer in answers.items() if key in last), otherwise)
        return [*text.encode(), END]

    return script


def event_stream(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """The body of a chat stream, for answers in OpenAI's shape that this server's model does not give."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 9, "completion_tokens": len(deltas), "total_tokens": 9 + len(deltas)}
    chunks.append({"choices": [], "usage": usage})  # type: ignore[dict-item]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
