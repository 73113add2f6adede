"""What `LLM` and `AsyncLLM` do, as coroutines for the private loop. Arguments are checked before one is made."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec

from millrace.config import DEFAULT_MAX_RUNNING, Config
from millrace.errors import BadRequest, MillraceError
from millrace.link.client import EngineClient
from millrace.link.vectors import Float32s, SparseVector, VectorRequest, shortened
from millrace.llm.arguments import Prompt, as_batch, read_params
from millrace.llm.beams import search_one
from millrace.llm.collector import Collector, OnPart
from millrace.llm.conversation import ChatModel, ToolChoice, open_conversation, read_conversation
from millrace.llm.encoding import Classification, EncoderCalls, Input
from millrace.llm.outputs import Generation, answer_message
from millrace.llm.ranking import (
    QUESTION,
    Ranked,
    RankingMethod,
    Score,
    by_answers,
    by_embedding,
    check_documents,
    check_ranking,
    ordered,
    score_of,
)
from millrace.llm.stream import Submit
from millrace.llm.tools import Toolbox
from millrace.observe.progress import count_progress, is_watched
from millrace.params.beams import BeamParams
from millrace.params.defaults import NEUTRAL_DEFAULTS, SamplingDefaults
from millrace.params.draws import Pooling
from millrace.params.keeping import Documents
from millrace.params.sampling import SamplingParams, check_drafter
from millrace.serve.generate.chat.open_chat import Chat
from millrace.serve.generate.vectors import NOT_TRAINED
from millrace.sources.encoders.encoder_files import EncoderFiles, EncoderTask
from millrace.sources.encoders.retrieval_files import Role
from millrace.text.answer_formats import choose_formats
from millrace.text.answer_parser import AnswerForm
from millrace.text.bad_words import with_bad_word_ids
from millrace.text.breakers import with_breaker_ids
from millrace.text.chat.template import ChatTemplate
from millrace.text.tokenizers.tokenizer import Tokenizer

S = TypeVar("S")
T = TypeVar("T")
_GIVES: dict[EncoderTask, str] = {
    "sparse": "This model is sparse (SPLADE) and gives no single vector; see embed_sparse() and rerank().",
    "multi": "This model gives a vector per token (ColBERT) and no single one; see embed_tokens() and rerank().",
    **dict.fromkeys(
        ("classify", "tag"), "This model is a classifier and gives no embeddings; see classify() and rerank()."
    ),
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a call of `chat` asks for besides the conversation."""

    method: str
    """For errors."""
    params: SamplingParams | None
    schema: Any
    toolbox: Toolbox
    template_kwargs: Mapping[str, Any] | None
    sampling: Mapping[str, object]


@dataclass
class Calls:
    config: Config
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling_defaults: SamplingDefaults
    encoder: EncoderFiles | None = None
    """What the files of an encoder, or of a decoder trained to embed, say."""
    is_embedder: bool = True
    """False if the model was not trained for embeddings."""

    @cached_property
    def encoding(self) -> EncoderCalls | None:
        ready = self.client.ready
        if self.encoder is None or ready is None:
            return None
        room = ready.max_context - (1 if self.encoder.is_decoder else 0)
        return EncoderCalls(self.encoder, self.client, self.tokenizer, room)

    @cached_property
    def chat_model(self) -> ChatModel:
        model = self.config.model
        formats = choose_formats(self.template, model.tool_format, model.reasoning_format)
        return ChatModel(self.tokenizer, self.template, formats)

    # -- texts -----------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        schema: Any,
        progress: bool | None,
        beams: BeamParams | None,
        sampling: Mapping[str, object],
    ) -> Coroutine[Any, Any, list[Generation]]:
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

    async def _generate_all(
        self, prompts: list[Prompt], params: list[SamplingParams], progress: bool, beams: BeamParams | None, schema: Any
    ) -> list[Generation]:
        with count_progress("generating", len(prompts), enabled=progress) as advance:

            async def one(asked: tuple[Prompt, SamplingParams]) -> Generation:
                token_ids, chosen = self._encode(asked[0]), asked[1]
                if beams is None:
                    generation = await self._generate_one(token_ids, chosen, schema=schema)
                else:
                    generation = await search_one(self.client, self.tokenizer, token_ids, chosen, beams)
                advance()
                return generation

            return await self._each(one, list(zip(prompts, params, strict=True)))

    def stream(self, prompt: Prompt, params: SamplingParams | None, sampling: Mapping[str, object]) -> Submit:
        (one,) = as_batch(prompt)
        return partial(self._submit, self._encode(one), read_params("stream", params, sampling, self.sampling_defaults))

    # -- conversations ---------------------------------------------------------------------------------------------
    def open_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, tool_choice: ToolChoice | None
    ) -> Chat:
        sampling = {**options.sampling, "schema": options.schema}
        params = read_params(options.method, options.params, sampling, self.sampling_defaults)
        conversation, use = read_conversation(messages, options.toolbox.specs, tool_choice, options.template_kwargs)
        return open_conversation(self.chat_model, conversation, use, params)

    def chat(
        self, messages: list[dict[str, Any]], options: ChatOptions, tool_choice: ToolChoice | None
    ) -> Coroutine[Any, Any, Generation[Any]]:
        """One answer, without running its calls."""
        opened = self.open_chat(messages, options, tool_choice)

        async def answer() -> Generation[Any]:
            found = await self._generate_one(
                opened.prompt.token_ids, opened.params, opened.form, options.schema, opened.prompt.documents
            )
            found.messages = [*messages, answer_message(found.choices[0])]
            return found

        return answer()

    def stream_chat(
        self, messages: list[dict[str, Any]], options: ChatOptions, tool_choice: ToolChoice | None
    ) -> Submit:
        opened = self.open_chat(messages, options, tool_choice)
        parts = {"form": opened.form, "schema": options.schema, "documents": opened.prompt.documents}
        return partial(self._submit, opened.prompt.token_ids, opened.params, **parts)

    # -- vectors and scores ----------------------------------------------------------------------------------------
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None,
        dimensions: int | None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> Coroutine[Any, Any, list[Float32s]]:
        batch, chosen, encoding = as_batch(prompts), self._pooling(pooling), self.encoding
        if encoding is None:
            if prompt_name is not None or truncate:
                name = "truncate" if prompt_name is None else "prompt_name"
                raise BadRequest(f"{name} is for models that were trained to embed; this one was not.", param=name)
            if not self.is_embedder:
                warnings.warn(NOT_TRAINED, stacklevel=3)
            return self._embed_all([self._encode(prompt) for prompt in batch], chosen, dimensions)
        if encoding.files.task != "embed":
            raise BadRequest(_GIVES[encoding.files.task])
        tokenised = iter(encoding.text_inputs([one for one in batch if isinstance(one, str)], prompt_name, truncate))
        inputs = [next(tokenised) if isinstance(one, str) else Input(list(one)) for one in batch]
        return self._encode_all(encoding, inputs, chosen, dimensions)

    def _pooling(self, asked: Pooling | None) -> Pooling:
        """As the model's files say, unless a decoder is asked for something else."""
        if self.encoder is not None and not self.encoder.is_decoder:
            if asked not in (None, "model"):
                raise BadRequest("pooling is set by the files of this model; leave it out.", param="pooling")
            return "model"
        if asked is not None and asked != "model":
            return asked
        return "mean" if self.encoder is not None and self.encoder.pooling == ("mean",) else "last"

    async def _encode_all(
        self, encoding: EncoderCalls, inputs: list[Input], pooling: Pooling, dimensions: int | None
    ) -> list[Float32s]:
        return [shortened(vector, dimensions) for vector in await encoding.vectors(inputs, pooling)]

    def score_pairs(self, query: str, texts: Sequence[str], truncate: bool) -> Coroutine[Any, Any, list[float]]:
        check_documents(texts)
        if self.encoding is None:
            raise BadRequest("This model writes text; score_pairs() needs a cross-encoder or a model for embeddings.")
        return self.encoding.pair_scores(query, texts, self._pooling(None), truncate)

    def embed_tokens(
        self, texts: str | Sequence[str], role: Role, truncate: bool
    ) -> Coroutine[Any, Any, list[Float32s]]:
        if self.encoding is None or self.encoding.files.multi is None:
            raise BadRequest("embed_tokens() needs a model with a vector per token (ColBERT); see embed().")
        if role not in ("query", "document"):
            raise BadRequest(f"role is {role!r}; it is 'query' or 'document'.", param="role")
        return self.encoding.token_vectors([texts] if isinstance(texts, str) else list(texts), role, truncate)

    def embed_sparse(
        self, texts: str | Sequence[str], prompt_name: str | None, max_weights: int | None, truncate: bool
    ) -> Coroutine[Any, Any, list[SparseVector]]:
        if self.encoding is None or self.encoding.files.sparse is None:
            raise BadRequest("embed_sparse() needs a model with sparse weights (SPLADE); see embed().")
        given = [texts] if isinstance(texts, str) else list(texts)
        return self.encoding.sparse_vectors(given, prompt_name, max_weights, truncate)

    def classify(self, texts: str | Sequence[str], truncate: bool) -> Coroutine[Any, Any, list[Classification]]:
        if self.encoding is None or self.encoding.files.task not in ("classify", "tag"):
            raise BadRequest("This model was not trained to classify; classify() needs a classifier.")
        return self.encoding.classify([texts] if isinstance(texts, str) else list(texts), truncate)

    async def _embed_all(self, batch: list[list[int]], pooling: Pooling, dimensions: int | None) -> list[Float32s]:
        requests: list[VectorRequest] = []
        try:
            requests.extend(VectorRequest(self.client, token_ids, pooling) for token_ids in batch)
            return [shortened((await request.done).vector, dimensions) for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def score(self, prompt: Prompt, texts: str | Sequence[str]) -> Coroutine[Any, Any, list[Score]]:
        given = [texts] if isinstance(texts, str) else list(texts)
        (before,) = as_batch(prompt)
        start = self._encode(before)
        if not start:
            raise BadRequest("The prompt has no tokens, so nothing can be scored after it.", param="prompt")
        ends = [self.tokenizer.encode(text, add_special=False) for text in given]
        if any(not end for end in ends):
            raise BadRequest("A text to score has no tokens.", param="texts")
        return self._each(partial(self._score_one, start), list(zip(given, ends, strict=True)))

    async def _score_one(self, start: list[int], end: tuple[str, list[int]]) -> Score:
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
        found = await self._generate_one(start + end[1], params)
        return score_of(*end, found.prompt_logprobs or ())

    def rerank(
        self, query: str, documents: Sequence[str], by: RankingMethod | None, truncate: bool = False
    ) -> Coroutine[Any, Any, list[Ranked]]:
        if by is None and self.encoding is not None:
            return self._by_scores(documents, self.score_pairs(query, documents, truncate))
        check_ranking(by, documents)
        return self._by_embedding(query, documents) if by == "embedding" else self._by_answers(query, documents)

    async def _by_scores(self, documents: Sequence[str], scores: Coroutine[Any, Any, list[float]]) -> list[Ranked]:
        return ordered(documents, await scores)

    async def _by_embedding(self, query: str, documents: Sequence[str]) -> list[Ranked]:
        first, *others = await self.embed([query, *documents], None, None)
        return by_embedding(first, documents, others)

    async def _by_answers(self, query: str, documents: Sequence[str]) -> list[Ranked]:
        questions = [self.encode_chat(QUESTION.format(document=document, query=query)) for document in documents]
        answers = [await self.score(question, ["Yes", "No"]) for question in questions]
        return by_answers(documents, [(yes, no) for yes, no in answers])

    # -- requests --------------------------------------------------------------------------------------------------
    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a conversation that consists of one user message."""
        conversation, use = read_conversation([{"role": "user", "content": text}], (), None, None)
        return open_conversation(self.chat_model, conversation, use, SamplingParams()).prompt.token_ids

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    async def _each(self, work: Callable[[S], Awaitable[T]], items: Sequence[S]) -> list[T]:
        """The results in order. Runs enough at once to fill every row, with a bound on memory for long lists."""
        window = asyncio.Semaphore(4 * (self.config.plan.max_running or DEFAULT_MAX_RUNNING))

        async def one(item: S) -> T:
            async with window:
                return await work(item)

        tasks = [asyncio.ensure_future(one(item)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _generate_one(
        self,
        token_ids: list[int],
        params: SamplingParams,
        form: AnswerForm | None = None,
        schema: Any = None,
        documents: Documents | None = None,
    ) -> Generation[Any]:
        collectors = await self._submit(token_ids, params, None, form=form, schema=schema, documents=documents)
        try:
            choices = [await collector.done for collector in collectors]
        finally:
            for collector in collectors:
                collector.cancel()
        first = collectors[0]
        return Generation(token_ids, choices, first.prompt_logprobs, first.cached_tokens, first.document_tokens)

    async def _submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        on_part: OnPart | None,
        *,
        form: AnswerForm | None = None,
        schema: Any = None,
        documents: Documents | None = None,
    ) -> list[Collector]:
        collectors: list[Collector] = []
        if self.encoder is not None and not self.encoder.is_decoder:
            raise BadRequest("This model reads texts and writes none; see embed(), rerank() and classify().")
        params = with_bad_word_ids(with_breaker_ids(params, self.tokenizer), self.tokenizer)
        check_drafter(params, self.client.ready.drafters if self.client.ready is not None else ())
        for index in range(params.n):
            choice_params = params
            if index > 0:
                seed = None if params.seed is None else (params.seed + index) % 2**64
                choice_params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
            collector = Collector(self.client, self.tokenizer, choice_params, index, on_part, form, schema)
            collectors.append(collector)
            try:
                collector.submit(token_ids, documents)
            except MillraceError:
                for other in collectors:
                    other.cancel()
                raise
        return collectors
