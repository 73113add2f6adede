"""Offline inference: `LLM(model).generate(prompts, params)`, and `LLM.stream` for asynchronous streaming.

Uses the same engine, channel and client as the HTTP server, in this process. The client runs in a private event loop on
its own thread, so these methods work in scripts, in notebooks and inside other event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from millrace.config import DEFAULT_MAX_RUNNING, Config, all_settings, load_config
from millrace.errors import BadRequest, ConfigError, MillraceError, RequestFailed
from millrace.link.client import EngineClient
from millrace.link.messages import EngineLoading, EngineReady, Finish, TokenLogprobs
from millrace.params import SamplingParams
from millrace.sources.resolve import resolve_model
from millrace.supervise.engine_process import EngineThread
from millrace.text.chat.template import ChatTemplate, load_chat_template
from millrace.text.text_stream import TextStream
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")
Prompt = str | Sequence[int]
"""Text or token ids."""
MAX_REPR_CHARS = 60


@dataclass(slots=True, repr=False)
class Choice:
    """One answer. `finish_reason` is "stop" or "length"; `stopped_by` is the stop string or end token id, if any."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stopped_by: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None

    def __repr__(self) -> str:
        return (
            f"Choice(index={self.index}, text={_shortened(self.text)}, num_tokens={len(self.token_ids)},"
            f" finish_reason={self.finish_reason!r}, stopped_by={self.stopped_by!r})"
        )


@dataclass(slots=True, repr=False)
class Generation:
    """All answers to one prompt."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0

    def __repr__(self) -> str:
        return (
            f"Generation(num_prompt_tokens={len(self.prompt_token_ids)}, cached_tokens={self.cached_tokens},"
            f" choices={self.choices!r})"
        )

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One token of a stream and the text it added, which is empty while text is held back for a stop string or an
    incomplete character. The last part of a choice has no token and carries the finished choice."""

    index: int
    text: str
    token_id: int | None = None
    choice: Choice | None = None


class LLM:
    """A model in this process. Keyword arguments are the settings of `millrace config`: `LLM(dtype="float32")`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        on_loading: Callable[[EngineLoading], None] | None = None,
        **settings: object,
    ) -> None:
        self.config = _config(model, settings)
        files = resolve_model(self.config.model.source)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm-loop", daemon=True)
        self._thread.start()
        self._engine = EngineThread(self.config)
        try:
            self.tokenizer: Tokenizer = load_tokenizer(files)
            self.chat_template: ChatTemplate = load_chat_template(
                files, self.tokenizer, self.config.model.chat_template
            )
            self._client: EngineClient = self._call(self._connect(on_loading))
        except BaseException:
            self._stop()
            raise

    def __repr__(self) -> str:
        if self._loop.is_closed():
            return f"LLM({self.config.model.source!r}, closed)"
        ready = self.ready
        return (
            f"LLM({self.config.model.source!r}, device={ready.device!r}, dtype={ready.dtype!r},"
            f" max_context={ready.max_context}, kv_tokens={ready.kv_tokens})"
        )

    @property
    def ready(self) -> EngineReady:
        """What the engine reported when it had loaded the model."""
        if self._client.ready is None:
            raise AssertionError("the constructor waits for the engine")
        return self._client.ready

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generation]:
        """One generation per prompt, in the order of the prompts. A prompt is a string or a list of token ids."""
        batch = _as_batch(prompts)
        per_prompt = _as_params(params, len(batch))
        return self._call(self._generate_all(batch, per_prompt, progress))

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template_options: Any
    ) -> Generation:
        """Answer a conversation, which is rendered with the model's chat template."""
        return self.generate([self.encode_chat(messages, **template_options)], params)[0]

    def encode_chat(self, messages: Sequence[dict[str, Any]], **template_options: Any) -> list[int]:
        rendered = self.chat_template.render(list(messages), **template_options)
        return self.tokenizer.encode(rendered, add_special=False)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamPart]:
        """Yield text as it is generated. Leaving the loop early cancels the request."""
        parts: asyncio.Queue[StreamPart | MillraceError] = asyncio.Queue()
        caller_loop = asyncio.get_running_loop()

        def on_part(part: StreamPart | MillraceError) -> None:
            with contextlib.suppress(RuntimeError):  # The caller's loop is closed.
                caller_loop.call_soon_threadsafe(parts.put_nowait, part)

        chosen = params or SamplingParams()
        collectors = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._submit(self._encode(prompt), chosen, on_part), self._loop)
        )
        num_unfinished = len(collectors)
        try:
            while num_unfinished:
                part = await parts.get()
                if isinstance(part, MillraceError):
                    raise part
                num_unfinished -= part.choice is not None
                yield part
        finally:
            for collector in collectors:
                self._loop.call_soon_threadsafe(collector.cancel)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if not self._loop.is_closed():
            self._call(self._client.close())
            self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- on the private loop ---------------------------------------------------------------------------------------

    async def _connect(self, on_loading: Callable[[EngineLoading], None] | None) -> EngineClient:
        client = EngineClient(self._engine.channel(), on_loading=on_loading)
        await client.wait_ready()
        return client

    async def _generate_all(
        self, prompts: list[Prompt], params: list[SamplingParams], progress: bool
    ) -> list[Generation]:
        from millrace.observe.progress import count_progress

        # Enough submitted requests to fill every row, and a bound on memory for long lists of prompts.
        window = asyncio.Semaphore(4 * (self.config.plan.max_running or DEFAULT_MAX_RUNNING))
        with count_progress("generating", len(prompts), enabled=progress) as advance:

            async def one(prompt: Prompt, chosen: SamplingParams) -> Generation:
                async with window:
                    generation = await self._generate_one(self._encode(prompt), chosen)
                    advance()
                    return generation

            tasks = [asyncio.ensure_future(one(p, c)) for p, c in zip(prompts, params, strict=True)]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def _generate_one(self, token_ids: list[int], params: SamplingParams) -> Generation:
        collectors = await self._submit(token_ids, params, None)
        try:
            choices = [await collector.done for collector in collectors]
        finally:
            for collector in collectors:
                collector.cancel()
        first = collectors[0]
        return Generation(token_ids, choices, first.prompt_logprobs, first.cached_tokens)

    async def _submit(
        self, token_ids: list[int], params: SamplingParams, on_part: Callable[[StreamPart | MillraceError], None] | None
    ) -> list[_Collector]:
        collectors: list[_Collector] = []
        for index in range(params.n):
            choice_params = params
            if index > 0:
                seed = None if params.seed is None else (params.seed + index) % 2**64
                choice_params = dataclasses.replace(params, seed=seed, prompt_logprobs=None)
            collector = _Collector(self._client, self.tokenizer, choice_params, index, on_part)
            collectors.append(collector)
            try:
                collector.submit(token_ids)
            except MillraceError:
                for other in collectors:
                    other.cancel()
                raise
        return collectors

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._loop.is_running():
            self._loop.close()


class _Collector:
    """Collects the tokens and text of one choice, aborts it at a stop string and then resolves `done`."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        params: SamplingParams,
        index: int,
        on_part: Callable[[StreamPart | MillraceError], None] | None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._params = params
        self._on_part = on_part
        self._text = TextStream(tokenizer, params)
        self._pieces: list[str] = []
        self._request_id: int | None = None
        self.choice = Choice(index, logprobs=[] if params.logprobs is not None else None)
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.cached_tokens = 0
        self.done: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()

    def submit(self, token_ids: list[int]) -> None:
        self._request_id = self._client.submit(
            token_ids, self._params, self, end_token_ids=self._tokenizer.end_token_ids
        )

    def cancel(self) -> None:
        """Abort the request unless it has finished."""
        if self._request_id is not None and not self.done.done():
            self._client.abort(self._request_id)

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._text.stopped_by is not None:
            return
        self.choice.token_ids.append(token_id)
        if self.choice.logprobs is not None and logprobs is not None:
            self.choice.logprobs.append(logprobs)
        text = self._text.push(token_id)
        self._pieces.append(text)
        if self._on_part is not None:
            self._on_part(StreamPart(self.choice.index, text, token_id))
        if self._text.stopped_by is not None and self._request_id is not None:
            self._client.abort(self._request_id, "stop")

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        self.prompt_logprobs = logprobs

    def on_finish(self, finish: Finish) -> None:
        self.cached_tokens = finish.cached_tokens
        if finish.reason in ("error", "abort", "deadline") and self._text.stopped_by is None:
            self._fail(RequestFailed(finish.message or f"The request ended early: {finish.reason}."))
            return
        rest = self._text.finish()
        self._pieces.append(rest)
        choice = self.choice
        choice.text = "".join(self._pieces)
        stop_token = finish.stop_token_id if finish.stop_token_id >= 0 else None
        choice.stopped_by = self._text.stopped_by if self._text.stopped_by is not None else stop_token
        choice.finish_reason = "stop" if choice.stopped_by is not None else finish.reason
        if self._on_part is not None:
            self._on_part(StreamPart(choice.index, rest, choice=choice))
        if not self.done.done():
            self.done.set_result(choice)

    def _fail(self, error: MillraceError) -> None:
        if self._on_part is not None:
            self._on_part(error)
            self.done.cancel()
        elif not self.done.done():
            self.done.set_exception(error)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MAX_REPR_CHARS else text[: MAX_REPR_CHARS - 1] + "…")


def _config(model: str | None, keywords: dict[str, object]) -> Config:
    """The settings of an `LLM(model, **keywords)` call. Errors name the keyword argument."""
    by_name = {setting.name: setting for setting in all_settings().values()}
    values: dict[str, object] = {"server.in_process": True}
    if model is not None:
        values["model.source"] = model
    for name, value in keywords.items():
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)
            hint = f"Did you mean '{close[0]}'?" if close else "`millrace config` lists all settings."
            raise ConfigError(f"LLM() has no keyword argument '{name}'. {hint}", param=name)
        setting = by_name[name]
        values[setting.key] = setting.convert(value, f"LLM(): keyword argument '{name}'")
    return load_config(None, values, origin="LLM()").config


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[int(item) for item in prompts if isinstance(item, int)]]
    batch: list[Prompt] = []
    for item in prompts:
        if isinstance(item, int):
            raise BadRequest(
                "The prompts mix token ids and strings; give each prompt as a string or a list of token ids."
            )
        batch.append(item)
    return batch


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise BadRequest(
            f"{count} prompts came with {len(params)} SamplingParams; give one for all prompts or one for each."
        )
    return list(params)
