"""A front as a running server: listening socket, TLS, signals and drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from millrace.config import Config
from millrace.errors import ConfigError, EngineUnavailable
from millrace.host.time_slice import request_short_slices
from millrace.link.client import EngineClient
from millrace.model_settings import ModelSettings
from millrace.observe.audit import AuditLog
from millrace.observe.metrics import FrontMetrics
from millrace.observe.slo.objective import parse_objectives
from millrace.serve.created_models import CreatedModels, uploaded_adapters
from millrace.serve.data_directory import data_directory
from millrace.serve.http.connection import FrontRunner
from millrace.serve.http.siblings import socket_path
from millrace.serve.model_control import FixedModels, ModelControl
from millrace.serve.routing import build_app
from millrace.serve.served_models import ServedModel, ServedModels
from millrace.serve.state import FrontState, ModelText
from millrace.serve.tenancy.keyring import Keyring
from millrace.serve.tenancy.quotas import Quotas
from millrace.settings_changes import with_live_changes
from millrace.sources.encoders.embedding_models import is_trained_to_embed
from millrace.sources.encoders.encoder_files import read_encoder
from millrace.sources.resolve import resolve_model
from millrace.sources.sampling_defaults import sampling_defaults
from millrace.text.chat.template import load_chat_template
from millrace.text.tokenizers.load import load_tokenizer

KEEP_ALIVE_S = 75.0
"""Maximum time that a connection may be idle or take to send the head of a request."""
STALLED_PEER_MS = 120_000
"""The kernel closes a connection whose peer has acknowledged nothing for this long (TCP_USER_TIMEOUT)."""
BACKLOG = 4096
CLOSE_GRACE_S = 2.0
MAX_OPEN_FILES = 1 << 20
GC_THRESHOLDS = (20_000, 20, 20)

OnListening = Callable[[str, int], None]

__all__ = [
    "FrontState",
    "build_app",
    "calm_collector",
    "drain",
    "listening_socket",
    "load_state",
    "run_front",
    "serve_front",
]

log = logging.getLogger("millrace.serve")


def listening_socket(host: str, port: int, config: Config, *, reuse_port: bool = False) -> socket.socket:
    """A bound TCP socket. Its small send buffer limits what an unread stream costs in the kernel."""
    family, _, _, _, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.server.stream_buffer_kb * 1024)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_PEER_MS)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port or --host.",
            param="server.port",
        ) from error
    sock.setblocking(False)
    return sock


def _resolve(host: str, port: int) -> Any:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(
            f"--host {host!r} is not an address of this machine: {error}.", param="server.host"
        ) from error


async def serve_front(
    state: FrontState,
    host: str,
    port: int,
    *,
    reuse_port: bool = False,
    on_listening: OnListening | None = None,
    sock: socket.socket | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (or `stop`), then drain; a second signal stops at once.

    Listens from the start, whether or not the engine is ready. `on_listening` is called with the address and port.
    """
    sock = sock or listening_socket(host, port, state.config, reuse_port=reuse_port)
    runner = FrontRunner(
        build_app(state),
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=CLOSE_GRACE_S,
        max_line_size=state.config.server.header_limit_kb * 1024,
        max_field_size=state.config.server.header_limit_kb * 1024,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG, ssl_context=tls_context(state.config)).start()
        if state.directory is not None:
            path = socket_path(state.directory, state.client.front_index)
            Path(path).unlink(missing_ok=True)  # From a front that was killed.
            await web.UnixSite(runner, path).start()
        # Build the detokenisation table now, so that the first answer does not wait for it.
        warm_up = asyncio.get_running_loop().run_in_executor(state.text_pool, lambda: state.tokenizer.table)
        if on_listening is not None:
            address = sock.getsockname()
            on_listening(address[0], address[1])
        await _until_stopped(state, stop or asyncio.Event())
        warm_up.cancel()
    finally:
        await runner.cleanup()
        state.close()


async def _until_stopped(state: FrontState, stop: asyncio.Event) -> None:
    """Wait for the first signal, then drain until done or until a second signal."""
    loop = asyncio.get_running_loop()
    second = asyncio.Event()

    def on_signal() -> None:
        (second if stop.is_set() else stop).set()

    signals = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in signals:
            loop.add_signal_handler(number, on_signal)
    except (RuntimeError, ValueError):
        pass  # Not the main thread: the owner of the process sets `stop`.
    try:
        await stop.wait()
        draining = loop.create_task(drain(state))
        hurried = loop.create_task(second.wait())
        await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            log.warning("Second signal: stopping now and aborting %d requests.", len(state.jobs))
            draining.cancel()
            state.lifecycle.stopped_at_once = True
            fail_open_jobs(state)
        hurried.cancel()
    finally:
        for number in signals:
            try:
                loop.remove_signal_handler(number)
            except (RuntimeError, ValueError):
                pass


async def drain(state: FrontState) -> None:
    """Drain: fail readiness, reject new requests, let running ones finish until the timeout, then end the rest with an
    error."""
    state.lifecycle.draining = True
    limit_s = state.config.server.drain_timeout_s
    if state.jobs:
        log.debug("Draining: %d requests may take up to %g s to finish.", len(state.jobs), limit_s)
        waits = [asyncio.ensure_future(_ended(job.done)) for job in state.jobs]
        await asyncio.wait(waits, timeout=limit_s)
        for wait in waits:
            wait.cancel()
    fail_open_jobs(state)


async def _ended(done: asyncio.Future[None]) -> None:
    await asyncio.wait((done,))


def fail_open_jobs(state: FrontState) -> None:
    for job in list(state.jobs):
        job.fail(EngineUnavailable("The server shut down before this request finished; send it again."))


def tls_context(config: Config) -> ssl.SSLContext | None:
    """None: plain HTTP."""
    server = config.server
    if bool(server.tls_cert) != bool(server.tls_key):
        raise ConfigError("server.tls_cert and server.tls_key must be set together; set both.", param="server.tls_cert")
    if not server.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"Cannot load the certificate {server.tls_cert} with the key {server.tls_key}: {error}.",
            param="server.tls_cert",
        ) from error
    return context


def allow_many_connections() -> None:
    """Raise the limit of open files: each stream is one, and the default limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else MAX_OPEN_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, MAX_OPEN_FILES), hard))


def calm_collector() -> None:
    """Run the garbage collector rarely and never over what a front loaded at start. A collection visits the objects of
    all open streams. Only for a process that is nothing but a front."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def load_state(
    models: Sequence[ModelSettings],
    clients: Mapping[str, EngineClient],
    control: ModelControl,
    *,
    directory: str | None = None,
) -> FrontState:
    """The state of a front: that of its first model, from which the others are found. `directory` holds the sockets
    that it shares with its siblings."""
    allow_many_connections()
    first = models[0]
    config, client, text = first.config, clients[first.name], read_text(first.config)
    observe, server = config.observe, config.server
    state = FrontState(
        config=config,
        client=client,
        tokenizer=text.tokenizer,
        template=text.template,
        model_name=first.name,
        metrics=FrontMetrics({model.name: clients[model.name] for model in models}, parse_objectives(observe.slos)),
        sampling_defaults=text.sampling_defaults,
        is_embedder=text.is_embedder,
        encoder=text.encoder,
        keyring=Keyring(Path(server.keys_file), config.plan.share_by) if server.keys_file else None,
        quotas=Quotas(directory, max(1, server.fronts), client.front_index),
        audit=AuditLog(observe.audit_log) if observe.audit_log else None,
        directory=directory,
        control=control,
    )
    created = CreatedModels(data_directory(server, first.name))
    state.models = ServedModels(created)
    for model in models:
        state.models.add(_served_model(state, model, clients[model.name], is_first=model is first))
        if client.front_index == 0:
            clients[model.name].adapters.known.lasting = partial(uploaded_adapters, created, model.name)
    return state


def _served_model(
    first: FrontState, model: ModelSettings, client: EngineClient, *, is_first: bool
) -> ServedModel[FrontState]:
    def read() -> FrontState:
        config = with_live_changes(model.config, first.config)
        return first.of_model(config, model.name, client, read_text(config))

    return ServedModel(
        model.name,
        client,
        first if is_first else None,
        read=read,
        aliases=model.aliases,
        source=model.config.model.source,
        loads_at_start=model.loads_at_start,
        keep_alive_s=model.config.model.keep_alive_s,
    )


def read_text(config: Config) -> ModelText:
    """Tokenizer and chat template of the model, from its files. Takes up to seconds."""
    files = resolve_model(config.model.source, offline=config.model.offline)
    tokenizer, encoder = load_tokenizer(files), read_encoder(files)
    return ModelText(
        tokenizer,
        load_chat_template(files, tokenizer, config.model.chat_template),
        sampling_defaults(files, config.model.generation_defaults),
        is_trained_to_embed(files),
        encoder,
    )


Connect = Callable[[], Awaitable[Mapping[str, EngineClient]]]
"""Makes the client of each model's engine, by name, on the front's event loop."""


def run_front(
    models: Sequence[ModelSettings],
    connect: Connect,
    control: ModelControl | None = None,
    *,
    on_state: Callable[[FrontState], None] | None = None,
    reuse_port: bool = False,
    directory: str | None = None,
) -> None:
    """Run a front until it is stopped: load the tokenizer, create the clients, serve, drain, close."""
    import uvloop

    async def run() -> None:
        server, clients = models[0].config.server, await connect()
        try:
            state = load_state(models, clients, control or FixedModels(), directory=directory)
            if on_state is not None:
                on_state(state)
            calm_collector()
            request_short_slices()
            await serve_front(state, server.host, server.port, reuse_port=reuse_port)
        finally:
            for client in clients.values():
                await client.close()

    uvloop.run(run())
