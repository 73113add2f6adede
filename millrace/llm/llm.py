"""Offline inference: `LLM(model).generate("…", max_tokens=32)`, `chat`, `stream`, `embed`, `score` and `rerank`.

Uses the same engine, channel and client as the HTTP server, in this process. The client runs in a private event loop on
its own thread, so these methods work in scripts, in notebooks and inside other event loops. `AsyncLLM` has the same
methods for asynchronous code.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

from millrace.errors import MillraceError
from millrace.link.client import EngineClient
from millrace.link.messages import EngineLoading, EngineReady
from millrace.link.vectors import Float32s, SparseVector
from millrace.llm.arguments import Prompt, read_config
from millrace.llm.calls import Calls, ChatOptions
from millrace.llm.conversation import Messages, ToolChoice, as_messages, open_conversation, read_conversation
from millrace.llm.encoding import Classification
from millrace.llm.outputs import Generation
from millrace.llm.ranking import Ranked, RankingMethod, Score
from millrace.llm.stream import GenerationStream, check_open
from millrace.llm.tools import Tool, Toolbox, result_message
from millrace.observe.progress import is_watched, stage_progress
from millrace.params.beams import BeamParams
from millrace.params.defaults import SamplingDefaults
from millrace.params.draws import Pooling
from millrace.params.sampling import SamplingParams
from millrace.sources.encoders.embedding_models import is_trained_to_embed
from millrace.sources.encoders.encoder_files import read_encoder
from millrace.sources.encoders.retrieval_files import Role
from millrace.sources.resolve import resolve_model
from millrace.sources.sampling_defaults import sampling_defaults
from millrace.supervise.engine_process import EngineThread
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
                defaults = sampling_defaults(files, self.config.model.generation_defaults)
                self._client: EngineClient = self._call(
                    self._connect(on_loading or (lambda stage: show(stage.what, stage.done, stage.total)))
                )
                # Native threads that still compute when the interpreter ends would abort the process.
                self._at_exit = partial(_close, weakref.ref(self))
                atexit.register(self._at_exit)
                parts = (self.tokenizer, self.chat_template, defaults, read_encoder(files), is_trained_to_embed(files))
                self._calls = Calls(self.config, self._client, *parts)
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
    def calls(self) -> Calls:
        """The same calls as coroutines, for `run`."""
        check_open(self._loop)
        return self._calls

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling of calls that leave it out."""
        return self._calls.sampling_defaults

    @sampling_defaults.setter
    def sampling_defaults(self, defaults: SamplingDefaults) -> None:
        self._calls.sampling_defaults = defaults

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
        return self._call(self.calls.generate(prompts, params, schema, progress, beams, sampling))

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
        options = ChatOptions("chat", params, schema, toolbox, chat_template_kwargs, sampling)
        for _ in range(tool_rounds):
            found = self._call(self.calls.chat(history, options, tool_choice))
            if not toolbox.runs(found.tool_calls):
                return found
            history = [*found.messages, *(result_message(call, toolbox.run(call)) for call in found.tool_calls)]
            tool_choice = None  # A required call was made; the model may now answer.
        return self._call(self.calls.chat(history, options, tool_choice))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> list[Float32s]:
        """A vector for each prompt. An encoder, or a model with sentence-transformers' module files, gives what they
        say; of other models it is the hidden state of the last token after the final norm, or the mean over the tokens,
        of length 1. `dimensions` keeps the first ones, again of length 1. `prompt_name`: which of the model's own
        prompts goes before each text. `truncate` cuts the ends of texts that are too long; without it they are refused.
        """
        return self._call(self.calls.embed(prompts, pooling, dimensions, prompt_name, truncate))

    def embed_tokens(
        self, texts: str | Sequence[str], *, role: Role = "document", truncate: bool = False
    ) -> list[Float32s]:
        """Of a model that compares token by token (ColBERT): for each text the vectors [tokens, width] that count. Two
        texts are compared by MaxSim, as `rerank` and `score_pairs` do. `role`: "query" or "document"."""
        return self._call(self.calls.embed_tokens(texts, role, truncate))

    def embed_sparse(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        max_weights: int | None = None,
        truncate: bool = False,
    ) -> list[SparseVector]:
        """Of a sparse model (SPLADE): for each text the weights of tokens of the vocabulary that are not 0.
        `max_weights` keeps the largest."""
        return self._call(self.calls.embed_sparse(texts, prompt_name, max_weights, truncate))

    def score_pairs(self, query: str, texts: Sequence[str], *, truncate: bool = False) -> list[float]:
        """How well each text fits the query: the score of a cross-encoder, the cosine of embeddings, MaxSim of
        vectors per token, or the dot product of sparse weights."""
        return self._call(self.calls.score_pairs(query, texts, truncate))

    def classify(self, texts: str | Sequence[str], *, truncate: bool = False) -> list[Classification]:
        """The classes of each text, or of its tokens, of a model that was trained for that."""
        return self._call(self.calls.classify(texts, truncate))

    def score(self, prompt: Prompt, texts: str | Sequence[str]) -> list[Score]:
        """How likely the model finds each text as the continuation of the prompt, in log-probabilities.

        The prompt and each text are tokenised apart, so begin a text with a space where a word begins.
        """
        return self._call(self.calls.score(prompt, texts))

    def rerank(
        self, query: str, documents: Sequence[str], *, by: RankingMethod | None = None, truncate: bool = False
    ) -> list[Ranked]:
        """The documents, those that fit the query best first.

        A cross-encoder reads query and document together, a model trained to embed compares vectors. For other models
        `by` must say what stands in: "embedding" compares their embeddings (`embed`), "yes_no" asks the model about
        each document and compares how likely it finds "Yes" and "No". Neither is what a trained reranker gives.
        """
        return self._call(self.calls.rerank(query, documents, by, truncate))

    def encode_chat(self, messages: Messages, **template_options: Any) -> list[int]:
        """The tokens of a conversation, rendered with the model's chat template."""
        conversation, use = read_conversation(as_messages(messages), (), None, template_options)
        return open_conversation(self.calls.chat_model, conversation, use, SamplingParams()).prompt.token_ids

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: object) -> GenerationStream:
        """Text as it is generated: `for part in llm.stream(…)` or `async for part in llm.stream(…)`."""
        return GenerationStream(self._loop, self.calls.stream(prompt, params, sampling))

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
        options = ChatOptions("stream_chat", params, schema, Toolbox(tools), chat_template_kwargs, sampling)
        return GenerationStream(self._loop, self.calls.stream_chat(as_messages(messages), options, tool_choice))

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if not self._loop.is_closed():
            atexit.unregister(self._at_exit)
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


def _close(which: weakref.ref[LLM]) -> None:
    if (llm := which()) is not None:
        llm.close()
