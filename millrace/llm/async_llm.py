"""`LLM` for asynchronous code: the same methods, to be awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, overload

from millrace.errors import EngineUnavailable
from millrace.link.messages import EngineReady
from millrace.link.vectors import Float32s, SparseVector
from millrace.llm.arguments import Prompt
from millrace.llm.calls import ChatOptions
from millrace.llm.conversation import Messages, ToolChoice, as_messages
from millrace.llm.encoding import Classification
from millrace.llm.llm import LLM
from millrace.llm.outputs import Generation, ToolCall
from millrace.llm.ranking import Ranked, RankingMethod, Score
from millrace.llm.stream import GenerationStream
from millrace.llm.tools import Tool, Toolbox, failure, result_message
from millrace.params.beams import BeamParams
from millrace.params.draws import Pooling
from millrace.params.sampling import SamplingParams
from millrace.sources.encoders.retrieval_files import Role

T = TypeVar("T")


class AsyncLLM:
    """A model in this process: `async with AsyncLLM("smollm2") as llm: await llm.chat("Hello")`.

    Takes the arguments of `LLM`. The model is loaded by `async with` or `await llm.load()`, while other tasks go on.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._model, self._settings = model, settings
        self._opened: LLM | None = None

    def __repr__(self) -> str:
        return f"Async{self._opened!r}" if self._opened is not None else f"AsyncLLM({self._model!r}, not loaded)"

    async def load(self) -> AsyncLLM:
        """Load the model, unless it is loaded."""
        if self._opened is None:
            self._opened = await asyncio.to_thread(LLM, self._model, **self._settings)
        return self

    @property
    def llm(self) -> LLM:
        """The same model for plain code."""
        if self._opened is None:
            raise EngineUnavailable("This AsyncLLM is not loaded; use `async with AsyncLLM(…) as llm` or `load()`.")
        return self._opened

    @property
    def ready(self) -> EngineReady:
        """What the engine reported when it had loaded the model."""
        return self.llm.ready

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        schema: Any = None,
        progress: bool | None = None,
        beams: BeamParams | None = None,
        **sampling: object,
    ) -> list[Generation]:
        """As `LLM.generate`."""
        return await self.llm.run(self.llm.calls.generate(prompts, params, schema, progress, beams, sampling))

    @overload
    async def chat(
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
    async def chat(
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

    async def chat(
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
        """As `LLM.chat`. Tools may be async functions; those of one answer then run at the same time."""
        llm, toolbox, history = self.llm, Toolbox(tools), as_messages(messages)
        options = ChatOptions("chat", params, schema, toolbox, chat_template_kwargs, sampling)
        for _ in range(tool_rounds):
            found = await llm.run(llm.calls.chat(history, options, tool_choice))
            if not toolbox.runs(found.tool_calls):
                return found
            results = await asyncio.gather(*(_result(toolbox, call) for call in found.tool_calls))
            history = [*found.messages, *results]
            tool_choice = None  # A required call was made; the model may now answer.
        return await llm.run(llm.calls.chat(history, options, tool_choice))

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> list[Float32s]:
        """As `LLM.embed`."""
        return await self.llm.run(self.llm.calls.embed(prompts, pooling, dimensions, prompt_name, truncate))

    async def embed_tokens(
        self, texts: str | Sequence[str], *, role: Role = "document", truncate: bool = False
    ) -> list[Float32s]:
        """As `LLM.embed_tokens`."""
        return await self.llm.run(self.llm.calls.embed_tokens(texts, role, truncate))

    async def embed_sparse(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        max_weights: int | None = None,
        truncate: bool = False,
    ) -> list[SparseVector]:
        """As `LLM.embed_sparse`."""
        return await self.llm.run(self.llm.calls.embed_sparse(texts, prompt_name, max_weights, truncate))

    async def score_pairs(self, query: str, texts: Sequence[str], *, truncate: bool = False) -> list[float]:
        """As `LLM.score_pairs`."""
        return await self.llm.run(self.llm.calls.score_pairs(query, texts, truncate))

    async def classify(self, texts: str | Sequence[str], *, truncate: bool = False) -> list[Classification]:
        """As `LLM.classify`."""
        return await self.llm.run(self.llm.calls.classify(texts, truncate))

    async def score(self, prompt: Prompt, texts: str | Sequence[str]) -> list[Score]:
        """As `LLM.score`."""
        return await self.llm.run(self.llm.calls.score(prompt, texts))

    async def rerank(
        self, query: str, documents: Sequence[str], *, by: RankingMethod | None = None, truncate: bool = False
    ) -> list[Ranked]:
        """As `LLM.rerank`."""
        return await self.llm.run(self.llm.calls.rerank(query, documents, by, truncate))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: object) -> GenerationStream:
        """As `LLM.stream`: `async for part in llm.stream(…)`."""
        return self.llm.stream(prompt, params, **sampling)

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> GenerationStream:
        """As `LLM.stream_chat`: `async for part in llm.stream_chat(…)`."""
        return self.llm.stream_chat(messages, params, **options)

    async def close(self) -> None:
        """Stop the engine and free its memory."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    async def __aenter__(self) -> AsyncLLM:
        return await self.load()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _result(toolbox: Toolbox, call: ToolCall) -> dict[str, Any]:
    result = toolbox.run(call)
    if inspect.isawaitable(result):
        try:
            result = await result
        except Exception as error:
            result = failure(error)
    return result_message(call, result)
