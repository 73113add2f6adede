"""Answers of /v1/chat/completions: chunks and whole bodies."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from millrace.errors import MillraceError
from millrace.link.messages import TokenLogprobs
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import Output, TextDelta, Tokens, Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.logprobs import token_logprobs
from millrace.serve.generate.writer import PLACEHOLDER
from millrace.serve.http.error_bodies import error_body
from millrace.serve.http.event_stream import DONE
from millrace.serve.http.json_answer import encode, escape_lines
from millrace.serve.openai.answers import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatFinish,
    ChatLogprobs,
    Delta,
)
from millrace.serve.openai.logprobs import prompt_logprobs
from millrace.serve.openai.schemas_tools import AnswerCall, CallDelta, FunctionCall, FunctionCallDelta
from millrace.serve.openai.write_shared import chosen, reasons, running_usage, usage_of
from millrace.text.answer_events import ToolCall


class ChatWriter:
    def __init__(self, job: Job, limit_names: dict[str, str], uses_functions: bool = False) -> None:
        """`uses_functions`: the request had `functions`, so the answer has `function_call`."""
        self._uses_functions = uses_functions
        self.limit_names = limit_names
        self._job = job
        self._generation = job.generation
        ready = job.state.client.ready
        self._common: dict[str, Any] = {
            "id": job.generation.answer_id,
            "created": job.generation.created,
            "model": job.state.answers_as,
            "system_fingerprint": ready.fingerprint if ready is not None else "",
        }

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def preamble(self, choices: list[Choice]) -> bytes:
        prompt = self._generation.prompts[0]
        # An empty text before reasoning or calls would be a part of its own to some clients.
        delta = Delta(role="assistant", content="" if self._generation.form is None else UNSET)
        ids = prompt.token_ids if self._generation.return_token_ids else UNSET
        dropped = prompt.num_dropped if self._generation.reports_dropped else UNSET
        return b"".join(
            self._frame(
                ChatChunkChoice(choice.index, delta),
                prompt_token_ids=ids if choice.index == 0 else UNSET,
                truncated_prompt_tokens=dropped if choice.index == 0 else UNSET,
            )
            for choice in choices
        )

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        shaped = self._frame(ChatChunkChoice(index, Delta(content=PLACEHOLDER)))
        before, _, after = shaped.partition(encode(PLACEHOLDER))
        return before, after

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        """The prompt is the same for all choices, so it is described once."""
        if not self._generation.prompt_logprobs or choice.index:
            return b""
        tokenizer = self._job.state.tokenizer
        shown = prompt_logprobs(tokenizer, choice.prompt.token_ids, choice.prompt_logprobs)
        return self._frame(ChatChunkChoice(choice.index, Delta(content="")), prompt_logprobs=shown)

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        generation = self._generation
        return self._frame(
            ChatChunkChoice(
                choice.index,
                Delta(content=delta.text),
                self._logprobs(delta.logprobs),
                token_ids=delta.token_ids if generation.return_token_ids else UNSET,
            )
        )

    def reasoning_delta(self, choice: DetailedChoice, text: str, tokens: Tokens) -> bytes:
        return self._delta(choice, Delta(reasoning_content=text), tokens)

    def call_start(self, choice: DetailedChoice, call: ToolCall, tokens: Tokens) -> bytes:
        named = FunctionCallDelta(call.name, "")
        if self._uses_functions:
            return self._delta(choice, Delta(function_call=named), tokens)
        return self._delta(choice, Delta(tool_calls=[CallDelta(call.index, call.id, "function", named)]), tokens)

    def call_arguments(self, choice: DetailedChoice, call: ToolCall, text: str, tokens: Tokens) -> bytes:
        more = FunctionCallDelta(arguments=text)
        if self._uses_functions:
            return self._delta(choice, Delta(function_call=more), tokens)
        return self._delta(choice, Delta(tool_calls=[CallDelta(call.index, function=more)]), tokens)

    def call_end(self, choice: DetailedChoice, call: ToolCall) -> bytes:
        return b""

    def _delta(self, choice: DetailedChoice, delta: Delta, tokens: Tokens) -> bytes:
        ids = tokens.token_ids if self._generation.return_token_ids else UNSET
        return self._frame(ChatChunkChoice(choice.index, delta, self._logprobs(tokens.logprobs), token_ids=ids))

    def finish_frame(self, choice: Choice) -> bytes:
        return self._frame(
            ChatChunkChoice(choice.index, Delta(), None, self._finish(choice), stop_reason=choice.stop_reason)
        )

    def _finish(self, choice: Choice) -> ChatFinish:
        reason = choice.finish_reason
        return "function_call" if reason == "tool_calls" and self._uses_functions else reason

    def end_frames(self, usage: Usage) -> bytes:
        if not self._generation.include_usage:
            return DONE
        chunk = ChatChunk(
            object="chat.completion.chunk",
            choices=[],
            usage=usage_of(usage, reasons=reasons(self._job)),
            **self._common,
        )
        return b"data: " + encode(chunk) + b"\n\n" + DONE

    def error_frames(self, error: MillraceError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _frame(self, choice: ChatChunkChoice, **further: Any) -> bytes:
        usage = running_usage(self._job)
        chunk = ChatChunk(object="chat.completion.chunk", choices=[choice], usage=usage, **self._common, **further)
        return b"data: " + escape_lines(encode(chunk)) + b"\n\n"

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        generation, tokenizer = self._generation, self._job.state.tokenizer
        first = choices[0]
        kept, vote = chosen(choices, generation)
        shown_prompt: Any = UNSET
        if generation.prompt_logprobs:
            shown_prompt = prompt_logprobs(tokenizer, first.prompt.token_ids, first.prompt_logprobs)
        return encode(
            ChatAnswer(
                object="chat.completion",
                choices=[self._choice(index, choice) for index, choice in enumerate(kept)],
                usage=usage_of(usage, reasons=reasons(self._job)),
                prompt_logprobs=shown_prompt,
                prompt_token_ids=first.prompt.token_ids if generation.return_token_ids else UNSET,
                truncated_prompt_tokens=first.prompt.num_dropped if generation.reports_dropped else UNSET,
                vote=vote,
                **self._common,
            )
        )

    def _choice(self, index: int, choice: CollectedChoice) -> ChatChoice:
        generation = self._generation
        output = choice.output
        return ChatChoice(
            index,
            self._message(output),
            self._logprobs(output.logprobs),
            self._finish(choice),
            choice.stop_reason,
            output.token_ids if generation.return_token_ids else UNSET,
        )

    def _message(self, output: Output) -> AnswerMessage:
        text, calls = output.text, [FunctionCall(call.name, call.arguments) for call in output.calls]
        message = AnswerMessage("assistant", text if text or not calls else None)
        if output.reasoning:
            message.reasoning_content = output.reasoning
        if calls and self._uses_functions:
            message.function_call = calls[0]
        elif calls:
            pairs = zip(output.calls, calls, strict=True)
            message.tool_calls = [AnswerCall(call.id, "function", function) for call, function in pairs]
        return message

    def _logprobs(self, entries: list[TokenLogprobs]) -> ChatLogprobs | None:
        num_top = self._generation.logprobs
        return None if num_top is None else ChatLogprobs(token_logprobs(self._job.state.tokenizer, entries, num_top))
