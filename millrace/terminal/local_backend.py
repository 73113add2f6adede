"""Answers from a model in this process, as a synchronous stream that Ctrl-C may interrupt anywhere."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.config import Config, all_settings
from millrace.llm import LLM, StreamPart
from millrace.params import SamplingParams
from millrace.terminal.model_download import obtain_model
from millrace.terminal.sampling_options import AnswerStats
from millrace.terminal.status_line import StatusLine


class LocalBackend:
    def __init__(self, config: Config) -> None:
        obtain_model(config.model.source)
        with StatusLine() as line:
            line.show("starting the engine")
            self._llm = LLM(
                config.model.source,
                on_loading=lambda stage: line.show(stage.what, stage.done, stage.total),
                **_settings(config),
            )
        self.model_name = self._llm.ready.model_name
        self.last = AnswerStats()

    def stream_chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams) -> Iterator[str]:
        yield from self._stream(self._llm.encode_chat([dict(message) for message in messages]), params)

    def stream_text(self, prompt: str, params: SamplingParams) -> Iterator[str]:
        yield from self._stream(self._llm.tokenizer.encode(prompt), params)

    def close(self) -> None:
        self._llm.close()

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[str]:
        pump = _Pump(self._llm, token_ids, params)
        started = time.monotonic()
        first_s, tokens, reason = 0.0, 0, "interruption"
        try:
            for part in pump.parts():
                if part.token_id is not None:
                    first_s = first_s or time.monotonic() - started
                    tokens += 1
                if part.choice is not None:
                    reason = part.choice.finish_reason
                if part.text:
                    yield part.text
        finally:
            pump.stop()
            self.last = AnswerStats(
                prompt_tokens=len(token_ids),
                output_tokens=tokens,
                first_token_s=first_s,
                total_s=time.monotonic() - started,
                finish_reason=reason,
            )


class _Pump:
    """Runs one asynchronous stream on its own thread and passes its parts on through a queue."""

    def __init__(self, llm: LLM, token_ids: list[int], params: SamplingParams) -> None:
        self._queue: queue.SimpleQueue[StreamPart | Exception | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._run(llm, token_ids, params))
        self._thread = threading.Thread(target=self._drive, name="stream", daemon=True)
        self._thread.start()

    def parts(self) -> Iterator[StreamPart]:
        while (part := self._queue.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    def stop(self) -> None:
        """Cancel the stream if it is still running; the engine then frees its row and blocks."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    def _drive(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._queue.put(None)

    async def _run(self, llm: LLM, token_ids: list[int], params: SamplingParams) -> None:
        stream = llm.stream(token_ids, params)
        try:
            async for part in stream:
                self._queue.put(part)
        except Exception as error:
            self._queue.put(error)
        finally:
            # An async generator that is abandoned early cleans up only when it is closed.
            await stream.aclose()  # type: ignore[attr-defined]


def _settings(config: Config) -> dict[str, Any]:
    """Keyword arguments of `LLM`; server settings do not apply here."""
    return {
        setting.name: getattr(getattr(config, setting.section), setting.name)
        for key, setting in all_settings().items()
        if setting.section != "server" and key != "model.source"
    }
