"""Answers of /v1/completions: chunks and whole bodies."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from millrace.errors import MillraceError
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import TextDelta, Usage
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.job import Job
from millrace.serve.generate.writer import PLACEHOLDER, TextOnly
from millrace.serve.http.error_bodies import error_body
from millrace.serve.http.event_stream import DONE
from millrace.serve.http.json_answer import encode, escape_lines
from millrace.serve.openai.answers import (
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    PromptLogprobs,
)
from millrace.serve.openai.logprobs import CompletionLogprobsWriter, joined, prompt_logprobs
from millrace.serve.openai.write_shared import chosen, running_usage, usage_of


class CompletionWriter(TextOnly):
    limit_names: dict[str, str]

    def __init__(self, job: Job) -> None:
        self.limit_names = {}
        self._job = job
        self._generation = job.generation
        self._tokenizer = job.state.tokenizer
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        ready = job.state.client.ready
        self._common: dict[str, Any] = {
            "id": job.generation.answer_id,
            "object": "text_completion",
            "created": job.generation.created,
            "model": job.state.answers_as,
            "system_fingerprint": ready.fingerprint if ready is not None else "",
        }

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def preamble(self, choices: list[Choice]) -> bytes:
        return b""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = self._frame(CompletionChunkChoice(index, PLACEHOLDER)).partition(encode(PLACEHOLDER))
        return before, after

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        generation = self._generation
        if not (
            generation.echo or generation.return_token_ids or generation.reports_dropped or generation.prompt_logprobs
        ):
            return b""
        logprobs = self._echo_logprobs(choice) if generation.echo else None
        return self._frame(
            CompletionChunkChoice(
                choice.index,
                self._echo_text(choice.prompt) if generation.echo else "",
                logprobs,
                prompt_token_ids=choice.prompt.token_ids if generation.return_token_ids else UNSET,
                truncated_prompt_tokens=choice.prompt.num_dropped if generation.reports_dropped else UNSET,
                prompt_logprobs=self._prompt_logprobs(choice),
            )
        )

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        logprobs = None
        if self._generation.logprobs is not None:
            logprobs = self._writer(choice).generated(delta.logprobs)
        return self._frame(
            CompletionChunkChoice(
                choice.index,
                delta.text,
                logprobs,
                token_ids=delta.token_ids if self._generation.return_token_ids else UNSET,
            )
        )

    def finish_frame(self, choice: Choice) -> bytes:
        self._writers.pop(choice.index, None)
        return self._frame(
            CompletionChunkChoice(choice.index, "", None, choice.finish_reason, stop_reason=choice.stop_reason)
        )

    def end_frames(self, usage: Usage) -> bytes:
        if not self._generation.include_usage:
            return DONE
        return b"data: " + encode(CompletionChunk(choices=[], usage=usage_of(usage), **self._common)) + b"\n\n" + DONE

    def error_frames(self, error: MillraceError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _frame(self, choice: CompletionChunkChoice) -> bytes:
        chunk = CompletionChunk(choices=[choice], usage=running_usage(self._job), **self._common)
        return b"data: " + escape_lines(encode(chunk)) + b"\n\n"

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        kept, vote = chosen(choices, self._generation)
        shown = [self._choice(index, choice) for index, choice in enumerate(kept)]
        return encode(CompletionAnswer(choices=shown, usage=usage_of(usage), vote=vote, **self._common))

    def _choice(self, index: int, choice: CollectedChoice) -> CompletionChoice:
        generation = self._generation
        text = choice.output.text
        return CompletionChoice(
            index,
            self._echo_text(choice.prompt) + text if generation.echo else text,
            self._logprobs(choice),
            choice.finish_reason,
            choice.stop_reason,
            self._prompt_logprobs(choice),
            choice.prompt.token_ids if generation.return_token_ids else UNSET,
            choice.output.token_ids if generation.return_token_ids else UNSET,
            choice.prompt.num_dropped if generation.reports_dropped else UNSET,
        )

    def _logprobs(self, choice: CollectedChoice) -> CompletionLogprobs | None:
        if self._generation.logprobs is None:
            return None
        echoed = self._echo_logprobs(choice) if self._generation.echo else None
        generated = self._writer(choice).generated(choice.output.logprobs)
        return generated if echoed is None else joined(echoed, generated)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs | UnsetType:
        if not self._generation.prompt_logprobs:
            return UNSET
        return prompt_logprobs(self._tokenizer, choice.prompt.token_ids, choice.prompt_logprobs)

    # ── echo ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _echo_text(self, prompt: Prompt) -> str:
        """The client's text, or the text of its token ids."""
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special=self._generation.params.skip_special_tokens)

    def _echo_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        if self._generation.logprobs is None:
            return None
        entries = choice.prompt_logprobs or (None,) * len(choice.prompt.token_ids)
        return self._writer(choice).echoed(choice.prompt.token_ids, entries)

    def _writer(self, choice: Choice) -> CompletionLogprobsWriter:
        """One per choice, because offsets continue from chunk to chunk."""
        writer = self._writers.get(choice.index)
        if writer is None:
            writer = CompletionLogprobsWriter(
                self._tokenizer,
                self._generation.logprobs or 0,
                skip_special=self._generation.params.skip_special_tokens,
            )
            self._writers[choice.index] = writer
        return writer
