"""Takes the pictures of the documentation from the running product: `make screenshots`, or
`python tools/screenshots.py --url http://127.0.0.1:8000` for a server that is running already.

Without --url it serves --model (downloaded if need be) on a free port, and stops it at the end. It needs Playwright and
Debian's chromium. Pictures are 1280 pixels wide and light, so that they stay small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

OUT = Path(__file__).parents[1] / "docs" / "images"
START_S = 900.0
"""Time to download, load and warm up a model."""
WAIT_MS = 120_000
QUESTION = "Explain in two sentences why the sky is blue."
QUESTIONS = ("What is the capital of France?", "Give me three tips for a good night's sleep.", QUESTION)
DONE = ".message.assistant[aria-busy=false]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--model", default="smollm2", help="the model to serve (default: smollm2)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures (default: docs/images)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(served(args.model))
        take_all(url.rstrip("/"), args.out)
    return 0


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "millrace", "serve", model, "--port", str(port), "--data-dir", data]
        server = subprocess.Popen([*command, "--slos", "ttft p95 < 2 s; errors < 0.1%"])
        try:
            wait_ready(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        if server.poll() is not None:
            raise SystemExit(f"The server ended with status {server.returncode}.")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit(f"The server was not ready after {START_S:.0f} s.")


def take_all(url: str, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("Chromium is not installed: apt install chromium.")
    for question in QUESTIONS * 2:  # Figures to show, and a warm cache.
        ask(url, question)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for name, take in (("playground", playground), ("dashboard", dashboard), ("schema", schema)):
            context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            take(page, url)
            path = out / f"{name}.png"
            page.screenshot(path=path)
            context.close()
            print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
        browser.close()


def ask(url: str, question: str, max_tokens: int = 60) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def open_page(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#status.good")


def send(page: Page, question: str) -> None:
    page.fill("#set-max_tokens", "120")
    page.fill("#input", question)
    page.press("#input", "Enter")
    page.wait_for_selector(DONE)


def playground(page: Page, url: str) -> None:
    """An answer coloured by token probability, with the alternatives of one token."""
    open_page(page, url)
    page.check("text=Token probabilities")
    send(page, QUESTION)
    page.locator(f"{DONE} .token").nth(5).hover()
    page.wait_for_selector(".popover")


def schema(page: Page, url: str) -> None:
    """An answer in a schema, with the verdict."""
    open_page(page, url)
    page.select_option("#set-format", "json_schema")
    send(page, "A large city of Europe, as JSON.")
    page.reload()  # The second answer does not wait for the schema to be compiled.
    page.wait_for_selector("#status.good")
    page.click("#new-chat")
    send(page, "A large city of Europe, as JSON.")
    page.wait_for_selector(f"{DONE} .notice")
    page.locator("#set-schema").scroll_into_view_if_needed()


def dashboard(page: Page, url: str) -> None:
    """While some requests run."""
    page.set_viewport_size({"width": 1280, "height": 1150})
    asking = [threading.Thread(target=ask, args=(url, f"Tell me a story, part {number}.", 200)) for number in range(3)]
    for one in asking:
        one.start()
    open_page(page, f"{url}/dashboard")
    page.wait_for_selector(".chart canvas[aria-label^='Time to first token']")
    while any(one.is_alive() for one in asking) and not page.locator("#requests tr").count():
        page.wait_for_timeout(100)


if __name__ == "__main__":
    sys.exit(main())
