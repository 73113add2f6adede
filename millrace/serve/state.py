"""The state of one front process. Built once and handed to every route."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from millrace.config import Config
from millrace.errors import EngineUnavailable, MillraceError
from millrace.link.client import EngineClient
from millrace.link.messages import EngineReady
from millrace.observe.audit import AuditLog
from millrace.observe.metrics import FrontMetrics
from millrace.observe.model_figures import ModelFigures
from millrace.observe.tracing.exporter import SpanExporter
from millrace.params.defaults import NEUTRAL_DEFAULTS, SamplingDefaults
from millrace.serve.created_models import CreatedModel
from millrace.serve.data_directory import data_directory
from millrace.serve.database import Store
from millrace.serve.fetching.fetcher import PrefixFetcher
from millrace.serve.fetching.source import BlockSource
from millrace.serve.http.siblings import Siblings
from millrace.serve.model_control import FixedModels, ModelControl
from millrace.serve.served_models import ServedModel, ServedModels, as_asked, loading_state
from millrace.serve.tenancy.admission import AdmissionControl
from millrace.serve.tenancy.keyring import Keyring
from millrace.serve.tenancy.quotas import Quotas
from millrace.settings_changes import with_live_changes
from millrace.sources.encoders.encoder_files import EncoderFiles
from millrace.text.answer_formats import AnswerFormats, choose_formats
from millrace.text.chat.template import ChatTemplate
from millrace.text.grammar.check_pool import CheckPool
from millrace.text.grammar.compiler import GrammarCompiler
from millrace.text.tokenizers.tokenizer import Tokenizer

TEXT_THREADS = 2


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A running job as /v1/requests shows it."""

    answer_id: str
    model: str
    request_id: str
    """The header X-Request-Id."""
    path: str
    owner: str
    created: int
    submitted_at: float
    """On `time.monotonic`."""
    stream: bool
    priority: int
    num_sequences: int
    prompt_tokens: int
    output_tokens: int
    """So far."""
    awaits_engine: bool


class OpenJob(Protocol):
    """A request that is generating: as much of it as the front needs to count, list and end it."""

    done: asyncio.Future[None]
    owner: str
    submitted_at: float

    @property
    def is_streamed(self) -> bool: ...

    def summary(self) -> JobSummary: ...

    def fail(self, error: MillraceError) -> None: ...

    def comment(self) -> None:
        """If it waits for an engine, tell its client, so that nobody in between takes the connection for dead."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What a front reads of a model's files."""

    tokenizer: Tokenizer
    template: ChatTemplate
    sampling_defaults: SamplingDefaults
    is_embedder: bool = False
    encoder: EncoderFiles | None = None


def _text_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=TEXT_THREADS, thread_name_prefix="text")


def _grammar_check() -> GrammarCompiler[None]:
    pool = CheckPool()
    return GrammarCompiler(pool, on_close=pool.close)


@dataclass(slots=True)
class Lifecycle:
    """The stages of a front's end, shared by the states of all its models."""

    draining: bool = False
    stopped_at_once: bool = False
    """A second signal came: stop without waiting for anything."""


@dataclass(slots=True)
class FrontState:
    """What a request needs to be answered: one model's engine, tokenizer and settings, and what all models share.

    Each model has a state of its own; `for_model` finds it. The first model's state is the application's.
    """

    config: Config
    """The settings of this model. Those of the server are the same for all models."""
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    model_name: str
    metrics: FrontMetrics
    sampling_defaults: SamplingDefaults = NEUTRAL_DEFAULTS
    """Sampling of requests that set none."""
    adapter: str = ""
    """The adapter of the model that answers; empty for the model itself."""
    made: CreatedModel | None = None
    """What a client made of the model, if the request names that."""
    is_embedder: bool = False
    """True if the model was trained to give embeddings."""
    encoder: EncoderFiles | None = None
    """What the files of an encoder, or of a decoder trained to embed, say; None for a model that only writes text."""
    text_pool: ThreadPoolExecutor = field(default_factory=_text_pool)
    """Threads that render and tokenise long texts, so that they do not stall other streams."""
    grammar_check: GrammarCompiler[None] = field(default_factory=_grammar_check)
    jobs: set[OpenJob] = field(default_factory=set)
    """Every request that is generating."""
    pulls: set[asyncio.Future[None]] = field(default_factory=set)
    """Downloads of models that clients asked for."""
    keyring: Keyring | None = None
    """None: no key is required."""
    quotas: Quotas = field(default_factory=Quotas)
    audit: AuditLog | None = None
    directory: str | None = None
    """Directory with the sockets of this server's processes; None if front and engine share one process."""
    fetcher: PrefixFetcher = field(default_factory=PrefixFetcher)
    """Fetches KV blocks from other replicas."""
    block_source: BlockSource = field(default_factory=BlockSource)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    started: int = field(default_factory=lambda: int(time.time()))
    spans: SpanExporter | None = field(init=False)
    """None: spans are not exported."""
    longest_token_bytes: int = 0
    """Length of the longest token of the vocabulary; 0 until first needed."""
    models: ServedModels[FrontState] = field(default_factory=ServedModels)
    """All models of this server by name, this one included."""
    control: ModelControl = field(default_factory=FixedModels)
    shared_store: Store | None = None
    """The store of the first model's state."""
    store: Store = field(init=False)
    loading_wait_s: float = field(init=False)
    """How long a request waits for its model to be loaded before it gets a 503."""
    formats: AnswerFormats = field(init=False)
    """How the model writes tool calls and reasoning."""
    admission: AdmissionControl = field(init=False)
    cors_origins: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.store = self.shared_store or Store(data_directory(self.config.server, self.model_name))
        self.loading_wait_s = self.config.server.loading_wait_s
        self.formats = choose_formats(self.template, self.config.model.tool_format, self.config.model.reasoning_format)
        otlp_url = self.config.observe.otlp_url
        self.spans = SpanExporter(otlp_url) if otlp_url and self.shared_store is None else None
        self.use_settings(self.config)
        if not self.models:
            self.models.add(ServedModel(self.model_name, self.client, self))

    def use_live_settings(self, changed: Config) -> None:
        """Take over the settings that can change while the server runs, for all models."""
        for model in self.models:
            if model.state is not None:
                model.state.use_settings(with_live_changes(model.state.config, changed))

    def use_settings(self, config: Config) -> None:
        """Take over settings, at the start and again when the operator changes those that are live."""
        self.config = config
        self.admission = AdmissionControl(config)
        origins = (origin.strip().rstrip("/") for origin in self.config.server.cors_origins.split(","))
        self.cors_origins = frozenset(origin for origin in origins if origin)

    @property
    def answers_as(self) -> str:
        """What answers give as their model."""
        if self.made is not None:
            return self.made.name
        return f"{self.model_name}:{self.adapter}" if self.adapter else self.model_name

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may give for what answers here."""
        found = self.models.names_of(self.models.find(self.model_name), self.adapter)
        return found if self.made is None else (self.made.name, *found)

    @property
    def figures(self) -> ModelFigures:
        """Of this model."""
        return self.metrics.models[self.model_name]

    @property
    def capabilities(self) -> list[str]:
        """What requests to this model may ask for."""
        if self.encoder is not None and not self.encoder.is_decoder:
            return ["embedding"] if self.encoder.task == "embed" else []
        has_template = bool(self.template.source)
        found = {
            "completion": True,
            "chat": has_template,
            "tools": has_template,
            "thinking": self.formats.reasoning is not None,
            "embedding": self.is_embedder or self.encoder is not None,
        }
        return [name for name, is_there in found.items() if is_there]

    @property
    def draining(self) -> bool:
        return self.lifecycle.draining

    async def for_model(self, name: str | None) -> FrontState:
        """The state of the model with this name or alias; without a name, of the first model. Reads its tokenizer if
        it is the first to ask. Raises `ModelNotFound`."""
        if name is None or name == self.model_name:
            return self
        model, adapter = self.models.with_adapter(name)
        state, made = await model.when_read(), self.models.made(name)
        if made is not None:
            return state.as_made(made)
        return state.with_adapter(adapter) if adapter else state

    def with_adapter(self, name: str) -> FrontState:
        """The same with one of the model's adapters. It shares everything else, and lives as long as one request."""
        state = copy.copy(self)
        state.adapter = name
        return state

    def as_made(self, made: CreatedModel) -> FrontState:
        """The same as a client changed it."""
        state = self.with_adapter(made.adapter)
        state.made = made
        state.sampling_defaults = made.over(self.sampling_defaults)
        return state

    def of_model(self, config: Config, name: str, client: EngineClient, text: ModelText) -> FrontState:
        """The state of a further model of the same server."""
        state = dataclasses.replace(
            self,
            config=config,
            client=client,
            tokenizer=text.tokenizer,
            template=text.template,
            sampling_defaults=text.sampling_defaults,
            is_embedder=text.is_embedder,
            encoder=text.encoder,
            model_name=name,
            longest_token_bytes=0,
            shared_store=self.store,
        )
        state.spans = self.spans
        return state

    @property
    def siblings(self) -> Siblings:
        return Siblings(self.directory, self.client.front_index, self.config.server.fronts)

    @property
    def body_limit_bytes(self) -> int:
        return self.config.server.body_limit_mb * 1024 * 1024

    async def await_engine(self, asked: str | None = None) -> None:
        """Wait up to `loading_wait_s` while the engine is loading. Raises like `require_engine`, with the model called
        `asked` if the client named it by an alias.

        An unloaded model is loaded; however many requests wait for it, it is asked for once.
        """
        try:
            await self._await_engine()
        except EngineUnavailable as error:
            raise EngineUnavailable(as_asked(error.message, self.model_name, asked)) from None

    async def _await_engine(self) -> None:
        client = self.client
        if client.ready is None and not self.draining:
            client.want()
            if client.failure is None:
                with contextlib.suppress(EngineUnavailable):  # A more specific error is raised below.
                    await client.wait_ready(self.loading_wait_s)
            if client.ready is None and client.failure is None:
                raise EngineUnavailable(f"{loading_state(self.model_name, self.client)}; try again in a few seconds.")
        self.require_engine()

    def require_engine(self) -> EngineReady:
        """The engine's limits. Raises `EngineUnavailable` if nothing can be generated now."""
        if self.draining:
            raise EngineUnavailable("The server is shutting down; send the request again later.")
        client = self.client
        if client.failure is not None:
            raise EngineUnavailable(client.failure)
        # A model that was unloaded since this request waited for it is loaded again; its engine then takes the request.
        limits = client.ready or client.limits
        if limits is None:
            raise EngineUnavailable(f"{loading_state(self.model_name, self.client)}; try again in a few seconds.")
        return limits

    def not_ready_because(self) -> str | None:
        """Why `/ready` must fail; None if the front is ready: a failing model does not stop the others."""
        if self.draining:
            return "The server is shutting down; send the request again later."
        for model in self.models:
            if model.loads_at_start and not model.client.num_engine_starts and model.client.failure is None:
                return f"The model {model.name!r} is still loading; try again in a few seconds."
        reasons = [model.unusable_because() for model in self.models]
        if all(reasons):
            return reasons[0]
        if self.config.observe.slo_ready:
            for name, figures in self.metrics.models.items():
                for objective in figures.slos.burning(time.time()):
                    return f"The error budget of an objective of {name!r} burns fast: {objective}."
        return None

    def close(self) -> None:
        if self.audit is not None:
            self.audit.close()
        self.text_pool.shutdown(wait=False, cancel_futures=True)
        self.grammar_check.close()
        self.store.close()


STATE = web.AppKey("state", FrontState)
