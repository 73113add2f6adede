"""Offline inference: `LLM(model).generate("…", max_tokens=32)`, `chat`, and `stream` in plain and asynchronous code.

Uses the same engine, channel and client as the HTTP server, in this process. The client runs in a private event loop on
its own thread, so these methods work in scripts, in notebooks and inside other event loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from millrace.config import DEFAULT_MAX_RUNNING
from millrace.errors import BadRequest, MillraceError
from millrace.link.client import EngineClient
from millrace.link.messages import EngineLoading, EngineReady
from millrace.link.vectors import Embedding, Float32s, VectorRequest, shortened
from millrace.llm.arguments import Messages, Prompt, as_batch, as_messages, read_config, read_params
from millrace.llm.beams import search_one
from millrace.llm.collector import Collector, OnPart
from millrace.llm.outputs import Generation
from millrace.llm.stream import GenerationStream
from millrace.observe.progress import count_progress, is_watched
from millrace.params import NEUTRAL_DEFAULTS, BeamParams, Pooling, SamplingParams, check_drafter
from millrace.sources.resolve import resolve_model
from millrace.sources.sampling_defaults import sampling_defaults
from millrace.supervise.engine_process import EngineThread
from millrace.text.bad_words import with_bad_word_ids
from millrace.text.breakers import with_breaker_ids
from millrace.text.chat.template import ChatTemplate, load_chat_template
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")


class LLM:
    """A model in this process. Keyword arguments are the settings of `millrace config`: `LLM(dtype="float32")`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        on_loading: Callable[[EngineLoading], None] | None = None,
        **settings: object,
    ) -> None:
        self.config = read_config(model, settings)
        files = resolve_model(self.config.model.source, offline=self.config.model.offline)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm-loop", daemon=True)
        self._thread.start()
        self._engine = EngineThread(self.config)
        try:
            self.tokenizer: Tokenizer = load_tokenizer(files)
            self.chat_template: ChatTemplate = load_chat_template(
                files, self.tokenizer, self.config.model.chat_template
            )
            self.sampling_defaults = sampling_defaults(files, self.config.model.generation_defaults)
            """Sampling of calls that leave it out."""
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
        progress: bool | None = None,
        beams: BeamParams | None = None,
        **sampling: object,
    ) -> list[Generation]:
        """One generation per prompt, in the order of the prompts. A prompt is a string or a list of token ids.

        Sampling is given as `SamplingParams` or as keyword arguments; what those leave out is what the model recommends
        (`sampling_defaults`). One of `schema`, `regex`, `choice` and `grammar` says what every answer must conform to:
        a schema is a dictionary or a type, such as a msgspec Struct or a pydantic model. With `beams` the choices are
        the best `n` beams, best first. `progress` shows a bar; by default in a terminal or notebook, for several
        prompts.
        """
        batch = as_batch(prompts)
        defaults = self.sampling_defaults if beams is None else NEUTRAL_DEFAULTS
        if params is None or isinstance(params, SamplingParams):
            per_prompt = [read_params("generate", params, sampling, defaults)] * len(batch)
        else:
            per_prompt = [read_params("generate", item, sampling, defaults) for item in params]
        if len(per_prompt) != len(batch):
            raise BadRequest(
                f"{len(batch)} prompts came with {len(per_prompt)} SamplingParams; give one for all prompts or one for"
                " each."
            )
        shows_bar = progress if progress is not None else len(batch) > 1 and is_watched()
        return self._call(self._generate_all(batch, per_prompt, shows_bar, beams))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: object,
    ) -> Generation:
        """Answer a conversation, which is rendered with the model's chat template. A string is one user message."""
        chosen = read_params("chat", params, sampling, self.sampling_defaults)
        return self.generate([self.encode_chat(messages, **(chat_template_kwargs or {}))], chosen)[0]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "last", dimensions: int | None = None
    ) -> list[Float32s]:
        """A vector of length 1 for each prompt: the hidden state of its last token after the final norm, or the mean
        over its tokens. `dimensions` keeps the first ones."""
        batch = [self._encode(prompt) for prompt in as_batch(prompts)]
        found = self._call(self._embed_all(batch, pooling))
        return [shortened(one.vector, dimensions) for one in found]

    def encode_chat(self, messages: Messages, **template_options: Any) -> list[int]:
        rendered = self.chat_template.render(as_messages(messages), **template_options)
        return self.tokenizer.encode(rendered, add_special=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: object) -> GenerationStream:
        """Text as it is generated: `for part in llm.stream(…)` or `async for part in llm.stream(…)`."""
        chosen = read_params("stream", params, sampling, self.sampling_defaults)
        return GenerationStream(self._loop, partial(self._submit, self._encode(prompt), chosen))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **sampling: object
    ) -> GenerationStream:
        """`stream` for a conversation, which is rendered with the model's chat template."""
        chosen = read_params("stream_chat", params, sampling, self.sampling_defaults)
        return GenerationStream(self._loop, partial(self._submit, self.encode_chat(messages), chosen))

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
        self, prompts: list[Prompt], params: list[SamplingParams], progress: bool, beams: BeamParams | None
    ) -> list[Generation]:
        # Enough submitted requests to fill every row, and a bound on memory for long lists of prompts.
        window = asyncio.Semaphore(4 * (self.config.plan.max_running or DEFAULT_MAX_RUNNING))
        with count_progress("generating", len(prompts), enabled=progress) as advance:

            async def one(prompt: Prompt, chosen: SamplingParams) -> Generation:
                async with window:
                    token_ids = self._encode(prompt)
                    if beams is None:
                        generation = await self._generate_one(token_ids, chosen)
                    else:
                        generation = await search_one(self._client, self.tokenizer, token_ids, chosen, beams)
                    advance()
                    return generation

            tasks = [asyncio.ensure_future(one(p, c)) for p, c in zip(prompts, params, strict=True)]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def _embed_all(self, batch: list[list[int]], pooling: Pooling) -> list[Embedding]:
        requests: list[VectorRequest] = []
        try:
            requests.extend(VectorRequest(self._client, token_ids, pooling) for token_ids in batch)
            return [await request.done for request in requests]
        finally:
            for request in requests:
                request.cancel()

    async def _generate_one(self, token_ids: list[int], params: SamplingParams) -> Generation:
        collectors = await self._submit(token_ids, params, None)
        try:
            choices = [await collector.done for collector in collectors]
        finally:
            for collector in collectors:
                collector.cancel()
        first = collectors[0]
        return Generation(token_ids, choices, first.prompt_logprobs, first.cached_tokens)

    async def _submit(self, token_ids: list[int], params: SamplingParams, on_part: OnPart | None) -> list[Collector]:
        collectors: list[Collector] = []
        params = with_bad_word_ids(with_breaker_ids(params, self.tokenizer), self.tokenizer)
        check_drafter(params, self.ready.drafters)
        for index in range(params.n):
            choice_params = params
            if index > 0:
                seed = None if params.seed is None else (params.seed + index) % 2**64
                choice_params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
            collector = Collector(self._client, self.tokenizer, choice_params, index, on_part)
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
