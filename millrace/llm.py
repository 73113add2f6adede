"""Offline use: `LLM(model).generate(prompts, params)`, and an async form that streams.

The same engine, channel and client as behind HTTP, in this process. A private event loop on its own thread carries the
client, so the calls here work from plain code, from notebooks and from other event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from millrace.config import MOST_RUNNING, Config, leaves, load_config
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


@dataclass(slots=True)
class Choice:
    """One answer. `finish_reason` is "stop" or "length"; `stopped_by` names the stop string or end token id."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stopped_by: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Generation:
    """All answers to one prompt."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class StreamPart:
    """What one token added: its text (often empty while held back), and at the end the finished choice."""

    index: int
    text: str
    token_id: int | None = None
    choice: Choice | None = None


class LLM:
    """A model in this process. Settings are those of `millrace config`, by leaf name: `LLM(dtype="float32")`."""

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
            self._shut()
            raise

    @property
    def ready(self) -> EngineReady:
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
        """Answers in the order of the prompts; each prompt is a text or a list of token ids."""
        batch = _as_batch(prompts)
        per_prompt = _as_params(params, len(batch))
        return self._call(self._generate_all(batch, per_prompt, progress))

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template_options: Any
    ) -> Generation:
        """One answer to a conversation, rendered with the model's chat template."""
        return self.generate([self.encode_chat(messages, **template_options)], params)[0]

    def encode_chat(self, messages: Sequence[dict[str, Any]], **template_options: Any) -> list[int]:
        rendered = self.chat_template.render(list(messages), **template_options)
        return self.tokenizer.encode(rendered, add_special=False)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamPart]:
        """Text as it is made. Leaving the iteration early cancels the request."""
        parts: asyncio.Queue[StreamPart | MillraceError] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def on_part(part: StreamPart | MillraceError) -> None:
            with contextlib.suppress(RuntimeError):  # The caller's loop has closed: nobody is listening.
                here.call_soon_threadsafe(parts.put_nowait, part)

        chosen = params or SamplingParams()
        collectors = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._submit(self._encode(prompt), chosen, on_part), self._loop)
        )
        open_choices = len(collectors)
        try:
            while open_choices:
                part = await parts.get()
                if isinstance(part, MillraceError):
                    raise part
                open_choices -= part.choice is not None
                yield part
        finally:
            for collector in collectors:
                self._loop.call_soon_threadsafe(collector.cancel)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if not self._loop.is_closed():
            self._call(self._client.close())
            self._shut()

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

        # Enough requests open to keep every row busy; a list of any length costs no more memory than that.
        window = asyncio.Semaphore(4 * (self.config.plan.max_running or MOST_RUNNING))
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
            own = params
            if index > 0:
                seed = None if params.seed is None else (params.seed + index) % 2**64
                own = dataclasses.replace(params, seed=seed, prompt_logprobs=None)
            collector = _Collector(self._client, self.tokenizer, own, index, on_part)
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

    def _shut(self) -> None:
        self._engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._loop.is_running():
            self._loop.close()


class _Collector:
    """The sink of one choice: gathers tokens and text, stops at stop strings, fulfils `done`."""

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
        """Ask the engine to stop, if it has not."""
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


def _config(model: str | None, settings: dict[str, object]) -> Config:
    by_name = {leaf.name: key for key, leaf in leaves().items()}
    layer: dict[str, object] = {"server.in_process": True}
    if model is not None:
        layer["model.source"] = model
    for name, value in settings.items():
        if name not in by_name:
            load_config(None, {name: value})  # Raises, naming the nearest setting.
            raise ConfigError(f"There is no setting '{name}'.", param=name)
        layer[by_name[name]] = value
    return load_config(None, layer).config


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[int(item) for item in prompts if isinstance(item, int)]]
    batch: list[Prompt] = []
    for item in prompts:
        if isinstance(item, int):
            raise BadRequest("The prompts mix token ids with texts; give each prompt as a text or a list of ids.")
        batch.append(item)
    return batch


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise BadRequest(f"{count} prompts came with {len(params)} SamplingParams; give one for all or one each.")
    return list(params)
