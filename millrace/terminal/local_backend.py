"""Answers from a model in this process, as a synchronous stream that Ctrl-C may interrupt anywhere."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from millrace.config import Config, all_settings
from millrace.llm import LLM
from millrace.terminal.model_download import obtain_model
from millrace.terminal.sampling_options import AnswerStats, SamplingFields
from millrace.terminal.status_line import StatusLine


class LocalBackend:
    def __init__(self, config: Config) -> None:
        obtain_model(config.model.source, offline=config.model.offline)
        with StatusLine() as line:
            line.show("starting the engine")
            self._llm = LLM(
                config.model.source,
                on_loading=lambda stage: line.show(stage.what, stage.done, stage.total),
                **llm_settings(config),
            )
        self.model_name = self._llm.ready.model_name
        self.last = AnswerStats()

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], fields: SamplingFields) -> Generator[str]:
        yield from self._stream(self._llm.encode_chat([dict(message) for message in messages]), fields)

    def stream_text(self, prompt: str, fields: SamplingFields) -> Generator[str]:
        yield from self._stream(self._llm.tokenizer.encode(prompt), fields)

    def takes_images(self) -> bool:
        return False  # Models in this process read text only.

    def close(self) -> None:
        self._llm.close()

    def _stream(self, token_ids: list[int], fields: SamplingFields) -> Generator[str]:
        parts = iter(self._llm.stream(token_ids, None, **fields))
        started = time.monotonic()
        first_s, tokens, reason = 0.0, 0, "interruption"
        try:
            for part in parts:
                if part.token_id is not None:
                    first_s = first_s or time.monotonic() - started
                    tokens += 1
                if part.choice is not None:
                    reason = part.choice.finish_reason
                if part.text:
                    yield part.text
        finally:
            self.last = AnswerStats(
                prompt_tokens=len(token_ids),
                output_tokens=tokens,
                first_token_s=first_s,
                total_s=time.monotonic() - started,
                finish_reason=reason,
            )


def llm_settings(config: Config) -> dict[str, Any]:
    """Keyword arguments of `LLM`; server settings do not apply here."""
    return {
        setting.name: getattr(getattr(config, setting.section), setting.name)
        for key, setting in all_settings().items()
        if setting.section != "server" and key != "model.source"
    }
