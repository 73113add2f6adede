"""Offline inference: `LLM(model).generate("…", max_tokens=32)`, `chat`, `stream`, `embed`, `score` and `rerank`.

Uses the same engine, channel and client as the HTTP server, in this process. The client runs in a private event loop on
its own thread, so these methods work in scripts, in notebooks and inside other event loops. `AsyncLLM` has the same
methods for asynchronous code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

import msgspec

from millrace.config import DEFAULT_MAX_RUNNING
from millrace.errors import BadRequest, MillraceError
from millrace.link.client import EngineClient
from millrace.link.messages import EngineLoading, EngineReady
from millrace.link.vectors import Embedding, Float32s, VectorRequest, shortened
from millrace.llm.arguments import Prompt, as_batch, read_config, read_params
from millrace.llm.beams import search_one
from millrace.llm.collector import Collector, OnPart
from millrace.llm.conversation import (
    ChatModel,
    Messages,
    ToolChoice,
    as_messages,
    open_conversation,
    read_conversation,
)
from millrace.llm.outputs import Generation, answer_message
from millrace.llm.ranking import (
    QUESTION,
    Ranked,
    RankingMethod,
    Score,
    by_answers,
    by_embedding,
    check_ranking,
    score_of,
)
from millrace.llm.stream import GenerationStream, check_open
from millrace.llm.tools import Tool, Toolbox, result_message
from millrace.observe.progress import count_progress, is_watched, stage_progress
from millrace.params import NEUTRAL_DEFAULTS, BeamParams, Pooling, SamplingParams, check_drafter
from millrace.sources.resolve import resolve_model
from millrace.sources.sampling_defaults import sampling_defaults
from millrace.supervise.engine_process import EngineThread
from millrace.text.answer_formats import choose_formats
from millrace.text.answer_parser import AnswerForm
from millrace.text.bad_words import with_bad_word_ids
from millrace.text.breakers import with_breaker_ids
from millrace.text.chat.template import ChatTemplate, load_chat_template
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")


class LLM:
    """A model in this process. Keyword arguments are the settings of `millrace config`: `LLM(dtype="float32")`.

    `progress` shows what is loaded and how far it is; by default in a terminal or notebook. `on_loading` is called
    with each stage instead.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: bool | None = None,
        on_loading: Callable[[EngineLoading], None] | None = None,
        **settings: object,
    ) -> None:
        self.config = read_config(model, settings)
        shows_bar = on_loading is None and (is_watched() if progress is None else progress)
        with stage_progress(enabled=shows_bar) as show:
            files = resolve_model(self.config.model.source, progress=show, offline=self.config.model.offline)
            show("starting the engine", 0, 0)
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
                self._client: EngineClient = self._call(
                    self._connect(on_loading or (lambda stage: show(stage.what, stage.done, stage.total)))
                )
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
    def device(self) -> str:
        return self.ready.device

    @property
    def dtype(self) -> str:
        return self.ready.dtype

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and output together."""
        return self.ready.max_context

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds, of all requests together."""
        return self.ready.kv_tokens

    @property
    def _chat_model(self) -> ChatModel:
        model = self.config.model
        formats = choose_formats(self.chat_template, model.tool_format, model.reasoning_format)
        return ChatModel(self.tokenizer, self.chat_template, formats)

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
        schema: Any = None,
        progress: bool | None = None,
        beams: BeamParams | None = None,
        **sampling: object,
    ) -> list[Generation]:
        """One generation per prompt, in the order of the prompts. A prompt is a string or a list of token ids.

        Sampling is given as `SamplingParams` or as keyword arguments; what those leave out is what the model recommends
        (`sampling_defaults`). One of `schema`, `regex`, `choice` and `grammar` says what every answer must conform to:
        a schema is a dictionary or a type, such as a msgspec Struct or a pydantic model, and `parsed` of a generation
        is then an object of it. With `beams` the choices are the best `n` beams, best first. `progress` shows a bar; by
        default in a terminal or notebook, for several prompts.
        """
        return self._call(self.generating(prompts, params, schema, progress, beams, sampling))

    def generating(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        schema: Any,
        progress: bool | None,
        beams: BeamParams | None,
        sampling: Mapping[str, object],
    ) -> Coroutine[Any, Any, list[Generation]]:
        """`generate`, checked and ready to run on the private loop."""
        batch = as_batch(prompts)
        sampling = {**sampling, "schema": schema}
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
        return self._generate_all(batch, per_prompt, shows_bar, beams, schema)

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        schema: type[T],
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        tool_rounds: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: object,
    ) -> Generation[T]: ...

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        schema: Any = None,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        tool_rounds: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: object,
    ) -> Generation[Any]: ...

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        schema: Any = None,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        tool_rounds: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: object,
    ) -> Generation[Any]:
        """Answer a conversation, which is rendered with the model's chat template. A string is one user message.

        `schema` as in `generate`; `parsed` is then the answer as an object. `tools` are Python functions with type
        annotations and a docstring, or tools as OpenAI writes them; `tool_calls` are the calls that the answer asks
        for. With `tool_rounds` the functions are run and their results given back, up to so many times, until the model
        answers with text. `messages` of the generation continue the conversation.
        """
        toolbox, history = Toolbox(tools), as_messages(messages)
        for _ in range(tool_rounds):
            found = self._call(
                self.chatting(history, params, schema, toolbox, tool_choice, chat_template_kwargs, sampling)
            )
            if not toolbox.runs(found.tool_calls):
                return found
            history = [*found.messages, *(result_message(call, toolbox.run(call)) for call in found.tool_calls)]
            tool_choice = None  # A required call was made; the model may now answer.
        return self._call(self.chatting(history, params, schema, toolbox, tool_choice, chat_template_kwargs, sampling))

    async def chatting(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None,
        schema: Any,
        toolbox: Toolbox,
        tool_choice: ToolChoice | None,
        template_kwargs: Mapping[str, Any] | None,
        sampling: Mapping[str, object],
    ) -> Generation[Any]:
        """One answer, on the private loop."""
        chosen = read_params("chat", params, {**sampling, "schema": schema}, self.sampling_defaults)
        conversation, use = read_conversation(messages, toolbox.specs, tool_choice, template_kwargs)
        opened = open_conversation(self._chat_model, conversation, use, chosen)
        found = await self._generate_one(opened.prompt.token_ids, opened.params, opened.form, schema)
        found.messages = [*messages, answer_message(found.choices[0])]
        return found

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "last", dimensions: int | None = None
    ) -> list[Float32s]:
        """A vector of length 1 for each prompt: the hidden state of its last token after the final norm, or the mean
        over its tokens. `dimensions` keeps the first ones."""
        return self._call(self.embedding(prompts, pooling, dimensions))

    def score(self, prompt: Prompt, texts: str | Sequence[str]) -> list[Score]:
        """How likely the model finds each text as the continuation of the prompt, in log-probabilities.

        The prompt and each text are tokenised apart, so begin a text with a space where a word begins.
        """
        return self._call(self.scoring(prompt, texts))

    def rerank(self, query: str, documents: Sequence[str], *, by: RankingMethod | None = None) -> list[Ranked]:
        """The documents, those that fit the query best first.

        Models that are trained to rerank cannot be loaded, so `by` must say what stands in: "embedding" compares the
        model's embeddings (`embed`), "yes_no" asks the model about each document and compares how likely it finds "Yes"
        and "No". Neither is what a trained reranker gives.
        """
        return self._call(self.ranking(query, documents, by))

    def encode_chat(self, messages: Messages, **template_options: Any) -> list[int]:
        """The tokens of a conversation, rendered with the model's chat template."""
        conversation, use = read_conversation(as_messages(messages), (), None, template_options)
        return open_conversation(self._chat_model, conversation, use, SamplingParams()).prompt.token_ids

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: object) -> GenerationStream:
        """Text as it is generated: `for part in llm.stream(…)` or `async for part in llm.stream(…)`."""
        (prompt,) = as_batch(prompt)
        chosen = read_params("stream", params, sampling, self.sampling_defaults)
        return GenerationStream(self._loop, partial(self._submit, self._encode(prompt), chosen))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        schema: Any = None,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: object,
    ) -> GenerationStream:
        """`stream` for a conversation, with `schema` and `tools` as in `chat`. Tool calls come with the last part, in
        its `choice`; the reasoning of models that reason comes apart from the text."""
        chosen = read_params("stream_chat", params, {**sampling, "schema": schema}, self.sampling_defaults)
        specs = Toolbox(tools).specs
        conversation, use = read_conversation(as_messages(messages), specs, tool_choice, chat_template_kwargs)
        opened = open_conversation(self._chat_model, conversation, use, chosen)
        submit = partial(self._submit, opened.prompt.token_ids, opened.params, form=opened.form, schema=schema)
        return GenerationStream(self._loop, submit)

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
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        progress: bool,
        beams: BeamParams | None,
        schema: Any = None,
    ) -> list[Generation]:
        # Enough submitted requests to fill every row, and a bound on memory for long lists of prompts.
        window = asyncio.Semaphore(4 * (self.config.plan.max_running or DEFAULT_MAX_RUNNING))
        with count_progress("generating", len(prompts), enabled=progress) as advance:

            async def one(prompt: Prompt, chosen: SamplingParams) -> Generation:
                async with window:
                    token_ids = self._encode(prompt)
                    if beams is None:
                        generation = await self._generate_one(token_ids, chosen, schema=schema)
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

    async def embedding(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling, dimensions: int | None
    ) -> list[Float32s]:
        found = await self._embed_all([self._encode(prompt) for prompt in as_batch(prompts)], pooling)
        return [shortened(one.vector, dimensions) for one in found]

    async def scoring(self, prompt: Prompt, texts: str | Sequence[str]) -> list[Score]:
        given = [texts] if isinstance(texts, str) else list(texts)
        (before,) = as_batch(prompt)
        start = self._encode(before)
        if not start:
            raise BadRequest("The prompt has no tokens, so nothing can be scored after it.", param="prompt")
        ends = [self.tokenizer.encode(text, add_special=False) for text in given]
        if any(not end for end in ends):
            raise BadRequest("A text to score has no tokens.", param="texts")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        found = await asyncio.gather(*(self._generate_one(start + end, params) for end in ends))
        return [
            score_of(text, end, one.prompt_logprobs or ()) for text, end, one in zip(given, ends, found, strict=True)
        ]

    async def ranking(self, query: str, documents: Sequence[str], by: RankingMethod | None) -> list[Ranked]:
        check_ranking(by, documents)
        if by == "embedding":
            first, *others = await self.embedding([query, *documents], "last", None)
            return by_embedding(first, documents, others)

        async def ask(document: str) -> tuple[Score, Score]:
            question = self.encode_chat(QUESTION.format(document=document, query=query))
            yes, no = await self.scoring(question, ["Yes", "No"])
            return yes, no

        return by_answers(documents, await asyncio.gather(*map(ask, documents)))

    async def _embed_all(self, batch: list[list[int]], pooling: Pooling) -> list[Embedding]:
        requests: list[VectorRequest] = []
        try:
            requests.extend(VectorRequest(self._client, token_ids, pooling) for token_ids in batch)
            return [await request.done for request in requests]
        finally:
            for request in requests:
                request.cancel()

    async def _generate_one(
        self, token_ids: list[int], params: SamplingParams, form: AnswerForm | None = None, schema: Any = None
    ) -> Generation[Any]:
        collectors = await self._submit(token_ids, params, None, form=form, schema=schema)
        try:
            choices = [await collector.done for collector in collectors]
        finally:
            for collector in collectors:
                collector.cancel()
        first = collectors[0]
        return Generation(token_ids, choices, first.prompt_logprobs, first.cached_tokens)

    async def _submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        on_part: OnPart | None,
        *,
        form: AnswerForm | None = None,
        schema: Any = None,
    ) -> list[Collector]:
        collectors: list[Collector] = []
        params = with_bad_word_ids(with_breaker_ids(params, self.tokenizer), self.tokenizer)
        check_drafter(params, self.ready.drafters)
        for index in range(params.n):
            choice_params = params
            if index > 0:
                seed = None if params.seed is None else (params.seed + index) % 2**64
                choice_params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
            collector = Collector(self._client, self.tokenizer, choice_params, index, on_part, form, schema)
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

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait on the caller's loop for what runs on the private one. Giving up cancels it."""
        return await asyncio.wrap_future(self._start(coroutine))

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            check_open(self._loop)
        except MillraceError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._start(coroutine)
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
