"""A real front on a real socket, in its own thread, with a null engine behind it. For tests only."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop
from serve.null_engine import NullEngine, Script

from millrace.config import Config, replace
from millrace.link.client import EngineClient
from millrace.link.messages import NewRequest, unpack_tokens
from millrace.observe.metrics import FrontMetrics
from millrace.observe.slo.objective import parse_objectives
from millrace.serve.app import FrontState, serve_front
from millrace.text.chat.template import ChatTemplate
from millrace.text.tokenizers.stand_in import build_stand_in
from millrace.text.tokenizers.tokenizer import Tokenizer

MODEL = "null-model"
END = 299
VOCAB = 300
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
T = TypeVar("T")


def byte_tokenizer() -> Tokenizer:
    """Ids below 256 are bytes; 256 to 299 are shown as numbers; 299 is the end token."""
    return build_stand_in({"vocab_size": VOCAB, "eos_token_id": END})


def saying(text: str, *, then: int = END) -> Script:
    """Every request is answered with the bytes of `text`."""
    tokens = [*text.encode(), then]
    return lambda request: tokens


def endless(request: NewRequest) -> Iterator[int]:
    """Letters without end; only a limit ends it."""
    number = 0
    while True:
        yield 97 + number % 26
        number += 1


def echo(request: NewRequest) -> list[int]:
    return [*unpack_tokens(request.prompt).tolist(), END]


@dataclass
class Front:
    url: str
    port: int
    state: FrontState
    engine: NullEngine
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread = field(repr=False)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the front's event loop and wait for its result."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=60)

    def begin_stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)


@contextmanager
def running_front(
    script: Script = endless,
    *,
    config: Config | None = None,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    max_open: int = 1 << 30,
    resume_s: float = 0.0,
    **engine_options: Any,
) -> Iterator[Front]:
    config = config or replace(Config(), server__port=0, server__drain_timeout_s=5.0)
    if not config.server.data_dir:
        with tempfile.TemporaryDirectory() as directory:
            config = replace(config, server__data_dir=directory)
            options = {"tokenizer": tokenizer, "template": template, "max_open": max_open, "resume_s": resume_s}
            with running_front(script, config=config, **options, **engine_options) as front:
                yield front
        return
    started: list[Front] = []
    failures: list[BaseException] = []
    listening = threading.Event()

    async def main() -> None:
        words = tokenizer or byte_tokenizer()
        engine = NullEngine(script, vocab_size=words.vocab_size, **engine_options)
        client = EngineClient(engine, max_open=max_open, resume_s=resume_s)
        state = FrontState(
            config=config,
            client=client,
            tokenizer=words,
            template=template or ChatTemplate({"default": TEMPLATE}, {}),
            model_name=MODEL,
            metrics=FrontMetrics({MODEL: client}, parse_objectives(config.observe.slos)),
        )
        stop = asyncio.Event()

        def on_listening(host: str, port: int) -> None:
            loop = asyncio.get_running_loop()
            url = f"http://{host}:{port}"
            started.append(Front(url, port, state, engine, loop, stop, threading.current_thread()))
            listening.set()

        try:
            await serve_front(state, "127.0.0.1", 0, on_listening=on_listening, stop=stop)
        finally:
            await client.close()

    def run() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            listening.set()

    thread = threading.Thread(target=run, name="front under test", daemon=True)
    thread.start()
    assert listening.wait(60)
    if failures:
        raise failures[0]
    front = started[0]
    try:
        yield front
    finally:
        if thread.is_alive():
            front.begin_stop()
        thread.join(60)
        assert not thread.is_alive(), "the front did not stop"
        if failures:
            raise failures[0]
