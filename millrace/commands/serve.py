"""`millrace serve`: starts engines and one or more fronts, and prints a request to paste when they are ready.

This process is front 0 and never imports torch; each engine is a child process (with --in-process, a thread).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from millrace.config import Config, LoadedConfig, ModelConfig, num_fronts, replace
from millrace.errors import ConfigError, EngineUnavailable, MillraceError
from millrace.settings_changes import ServerSettings
from millrace.terminal.running_servers import Announcement, announced, read_settings
from millrace.terminal.settings_options import SERVER_SETTINGS, add_models, add_settings, given_settings, load_settings
from millrace.terminal.startup_message import reachable_url
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.link.client import EngineClient
    from millrace.link.messages import EngineLoading, EngineReady
    from millrace.model_settings import ModelSettings
    from millrace.serve.app import FrontState
    from millrace.supervise.engine_process import EngineHandle
    from millrace.supervise.fronts import Fronts
    from millrace.supervise.model_supervisor import ModelSupervisor
    from millrace.supervise.spare_engine import SpareEngine

USAGE = "millrace serve [MODEL …] [options]"
EXAMPLES = """\
examples:
  millrace serve                                       the default model on http://127.0.0.1:8000
  millrace serve qwen2.5-coder-1.5b --port 8123        a model known by name (see millrace models)
  millrace serve ./my-model --dtype float32            a Hugging Face directory
  millrace serve my-model.gguf --kv-gib 2              a GGUF file, with 2 GiB for the KV pool
  millrace serve org/name --config my.toml             a Hugging Face id, with settings from a file
  millrace serve qwen2.5-0.5b gemma-3-270m             several models, each loaded when a request names it
  millrace serve random:config.json                    random weights of this shape, for benchmarks
  millrace serve --keys-file keys.toml                 require API keys (millrace keys creates them)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    add_settings(parser, shown=SERVER_SETTINGS)
    parser.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="accepted for compatibility with vLLM: tool calls are always recognised",
    )


def run(args: argparse.Namespace) -> int:
    from millrace.observe.logs import setup_logging

    sources: list[str] = args.model
    args.model = sources[0] if sources else None
    loaded = load_settings(args)
    setup_logging(loaded.config.observe.log_level, process="front")
    with announced(given_settings(args), args.config, sources) as announcement:
        Server(models_to_serve(loaded, sources), loaded.config, announcement).run()
    return 0


def models_to_serve(loaded: LoadedConfig, sources: list[str]) -> tuple[ModelSettings, ...]:
    """The models with their settings. The number of fronts is the same for all."""
    from millrace.model_settings import settings_of_models
    from millrace.sources.default_name import default_name

    fronts = num_fronts(loaded.config, len(os.sched_getaffinity(0)))
    loaded = dataclasses.replace(loaded, config=replace(loaded.config, server__fronts=fronts))
    return settings_of_models(loaded, sources, default_name)


class Server:
    """Starts and stops everything that belongs to one server."""

    def __init__(self, models: Sequence[ModelSettings], settings: Config, announcement: Announcement) -> None:
        """`settings`: as given, before they are completed for each model."""
        self._started = time.monotonic()
        self._models = tuple(models)
        self._config = models[0].config
        settings = replace(settings, server__fronts=self._config.server.fronts)
        self._settings = ServerSettings(settings, {model.name: model.config for model in self._models})
        self._device = ""
        check_port(self._config.server.host, self._config.server.port)
        for model in self._models:
            check_formats(model.config.model)
        check_files(self._config)
        self._failure = ""
        self._is_ready = False
        self._line = StatusLine()
        self._announcement = announcement
        self._stop = asyncio.Event()
        self._engines: list[EngineHandle] = []
        self._orders: set[asyncio.Task[None]] = set()
        self._front: FrontState | None = None
        """Of this process, once it serves."""
        self._spare: SpareEngine | None = None
        self._given = self._config.server
        """With port 0 if any free one is taken."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def run(self) -> None:
        """Serve until a signal. Raises if the engine could not start or kept dying."""
        from millrace.terminal.model_download import obtain_model

        for model in self._models:
            obtain_model(model.config.model.source, offline=model.config.model.offline)
        # Start the first engine before anything else: its imports take longest and run in parallel with all below.
        self._engines = [engine for engine in (self._first_engine(),) if engine is not None]
        try:
            import uvloop

            with tempfile.TemporaryDirectory(prefix="millrace-server-") as directory, ExitStack() as resources:
                uvloop.run(self._serve(directory, resources))
        finally:
            for engine in self._engines:
                self._end(engine)
            if self._scratch is not None:
                self._scratch.cleanup()
        if self._failure:
            raise EngineUnavailable(self._failure)

    def _first_engine(self) -> EngineHandle | None:
        """The engine of the first model that is loaded at start."""
        from millrace.supervise.engine_process import start_engine
        from millrace.supervise.memory_share import config_beside

        first = next((model for model in self._models if model.loads_at_start), None)
        if first is None:
            return None
        return start_engine(
            config_beside(self._for_engine(first), (), self._config.server.max_loaded or len(self._models))
        )

    def _for_engine(self, model: ModelSettings) -> Config:
        """With the file that keeps canaries of the model's adapters: an engine does not know the data directory."""
        config = model.config
        if not config.adapters.num_slots or config.adapters.canary_file:
            return config
        from millrace.serve.data_directory import canary_file

        server = self._given
        if not server.port and not server.name:  # No later server is the same as this one.
            self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="millrace-canaries-")
            server = dataclasses.replace(server, data_dir=self._scratch.name)
        file = canary_file(server, self._models[0].name, model.name)
        return replace(config, adapters__canary_file=str(file))

    def _end(self, engine: EngineHandle) -> None:
        """Kill an engine that is still loading: it has nothing to finish and would not react before it is ready."""
        if not self._is_ready:
            engine.kill()
        engine.stop()

    async def _serve(self, directory: str, resources: ExitStack) -> None:
        """`resources` are released after the server has stopped."""
        from millrace.serve.app import calm_collector, listening_socket, load_state, serve_front
        from millrace.serve.data_directory import data_directory, held
        from millrace.supervise.fronts import Fronts
        from millrace.supervise.reload import Reloader

        server = self._config.server
        sock = listening_socket(server.host, server.port, self._config, reuse_port=server.fronts > 1)
        self._take_port(sock.getsockname()[1])
        if not server.data_dir:
            resources.enter_context(held(data_directory(self._config.server, self._models[0].name)))
        clients = self._connect()
        fronts = Fronts(self._models, directory)
        models = self._supervise(clients, fronts)
        tasks: list[asyncio.Task[None]] = []
        try:
            state = load_state(self._models, clients, models, directory=directory)
            self._front = state
            fronts.watch(lambda order: self._obey(models, order), lambda index: on_front_lost(state, index))
            reloader = Reloader(
                self._settings,
                state.use_live_settings,
                models.use_settings,
                fronts,
                self._read_settings,
                self._on_reloaded,
            )
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.reload)
            calm_collector()
            tasks = [asyncio.create_task(self._announce(state)), asyncio.create_task(self._on_stop(state, fronts))]
            await serve_front(state, server.host, self._config.server.port, sock=sock, stop=self._stop)
            if state.lifecycle.stopped_at_once:
                fronts.kill()
        finally:
            # The first engine may not be watched yet. Stopping an engine twice does nothing.
            self._engines = list(dict.fromkeys((*self._engines, *models.close())))
            if self._spare is not None:
                self._spare.close()
            for task in (*tasks, *self._orders):
                task.cancel()
            for client in clients.values():
                await client.close()
            await asyncio.to_thread(fronts.stop, server.drain_timeout_s)

    def _take_port(self, port: int) -> None:
        """The port that was chosen if the setting is 0."""
        self._models = tuple(
            dataclasses.replace(model, config=replace(model.config, server__port=port)) for model in self._models
        )
        self._config = self._models[0].config
        settings = replace(self._settings.config, server__port=port)
        self._settings = ServerSettings(settings, {model.name: model.config for model in self._models})

    def _connect(self) -> dict[str, EngineClient]:
        """A client for each model; that of the first model that is loaded at start has an engine."""
        from millrace.link.client import EngineClient
        from millrace.supervise.front_child import max_open_requests

        self._line.show("starting the engine")
        channels = [engine.channel(0) for engine in self._engines]
        return {
            model.name: EngineClient(
                channels.pop(0) if model.loads_at_start and channels else None,
                max_open=max_open_requests(model.config),
                resume_s=model.config.server.resume_s,
                on_loading=self._show_loading,
            )
            for model in self._models
        }

    def _supervise(self, clients: Mapping[str, EngineClient], fronts: Fronts) -> ModelSupervisor:
        from millrace.supervise.engine_process import start_engine
        from millrace.supervise.model_supervisor import ModelSupervisor
        from millrace.supervise.spare_engine import SpareEngine

        server = self._config.server
        spare = self._spare = SpareEngine(max(1, server.fronts))
        supervisor = ModelSupervisor(
            self._models,
            clients,
            start=lambda model: start_engine(self._for_engine(model), spare.take()),
            announce=lambda event: self._tell_fronts(fronts, event),
            on_only_model_lost=self._end_with,
            prepare=spare.prepare if server.spare_engine and not server.in_process else lambda: None,
        )
        supervisor.begin(self._engines[0] if self._engines else None)
        return supervisor

    def _tell_fronts(self, fronts: Fronts, event: dict[str, Any]) -> None:
        fronts.announce(event)
        if event["event"] == "keep_alive" and self._front is not None:
            self._front.models.find(event["model"]).keep_alive_s = event["seconds"]

    def _obey(self, models: ModelSupervisor, order: dict[str, Any]) -> None:
        """Do what another front asks for."""
        name, kind = order["model"], order["order"]
        if kind == "keep_alive":
            work = models.keep_alive(name, order["seconds"])
        else:
            work = models.load(name) if kind == "load" else models.unload(name)
        task = asyncio.get_running_loop().create_task(work)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    def _show_loading(self, stage: EngineLoading) -> None:
        if not self._is_ready:
            self._line.show(stage.what, stage.done, stage.total)

    async def _announce(self, state: FrontState) -> None:
        """Print that the server is ready, or end with the reason if its only engine could not start."""
        from millrace.serve.data_directory import other_data
        from millrace.terminal.startup_message import (
            memory_table,
            open_server_warning,
            others_lines,
            serving_lines,
            try_lines,
        )

        loaded: list[EngineReady] = []
        for model in state.models:
            if model.loads_at_start:
                try:
                    loaded.append(await model.client.wait_ready())
                except EngineUnavailable as error:
                    if len(state.models) == 1:
                        self._end_with(error.message)
                        return
        self._is_ready = True
        self._line.clear()
        server, url = self._config.server, server_url(self._config)
        self._device = loaded[0].device if loaded else ""
        self._list_server()
        needs_key = bool(server.keys_file)
        warning = "" if needs_key else open_server_warning(server.host)
        for text in (warning, other_data(server, self._models[0].name)):
            if text:
                print(text, file=sys.stderr, flush=True)
        took_s = time.monotonic() - self._started
        names, is_chat = [model.name for model in state.models], is_chat_model(state)
        lines = [text for ready in loaded for text in (*memory_table(ready), *serving_lines(ready, url, took_s))]
        lines += others_lines(names, [ready.model_name for ready in loaded], url)
        for text in (*lines, *try_lines(names[0], url, is_chat=is_chat, needs_key=needs_key, task=_task(state))):
            print(text, flush=True)

    def _list_server(self) -> None:
        """Make the server known to `millrace ps`, `stop` and `reload`."""
        names = ", ".join(model.name for model in self._models)
        settings = self._settings
        self._announcement.write(names, server_url(self._config), self._device, settings.config, settings.models)

    def _read_settings(self) -> ServerSettings:
        announcement = self._announcement
        return read_settings(announcement.settings_file, announcement.options, announcement.sources)

    def _on_reloaded(self, settings: ServerSettings) -> None:
        self._settings = settings
        if self._is_ready:
            self._list_server()

    async def _on_stop(self, state: FrontState, fronts: Fronts) -> None:
        """When this front begins to drain, say so and drain the other fronts."""
        await self._stop.wait()
        if not self._failure:
            self._line.clear()
            print(draining_line(num_requests(state), self._config.server.drain_timeout_s), file=sys.stderr, flush=True)
        fronts.drain()

    def _end_with(self, failure: str) -> None:
        """Stop the server with an error. Only the first failure is reported, and none after a requested stop."""
        self._line.clear()
        if not self._stop.is_set():
            self._failure = failure
            self._stop.set()


def server_url(config: Config) -> str:
    """Under which a client on this machine reaches the server."""
    url = reachable_url(config.server.host, config.server.port)
    return url.replace("http://", "https://", 1) if config.server.tls_cert else url


def on_front_lost(state: FrontState, index: int) -> None:
    """Another front has died: its requests end."""
    state.metrics.front_restarts.inc()
    for model in state.models:
        model.client.abort_front(index)


def num_requests(state: FrontState) -> int:
    """This front's, if it is the only one; of several, as the engines last reported them, which may be a little old."""
    if state.config.server.fronts <= 1:
        return len(state.jobs)
    stats = [model.client.stats for model in state.models]
    return max(len(state.jobs), sum(one.running + one.waiting for one in stats if one is not None))


def draining_line(num_open: int, timeout_s: float) -> str:
    if not num_open:
        return "Stopping: no requests are running."
    requests = "1 request" if num_open == 1 else f"{num_open:,} requests"
    return f"Draining: {requests} running, up to {timeout_s:g} s. Press Ctrl-C again to stop now."


def _task(state: FrontState) -> str:
    """What the encoder does; "" for a model that writes text."""
    encoder = state.encoder
    if encoder is None or encoder.is_decoder:
        return ""
    return "rank" if encoder.ranks else encoder.task


def is_chat_model(state: FrontState) -> bool:
    try:
        state.template.render([{"role": "user", "content": "Hello"}])
    except MillraceError:
        return False
    return True


def check_formats(model: ModelConfig) -> None:
    """Check the names of formats before anything is loaded."""
    if model.tool_format != "auto" or model.reasoning_format not in ("auto", "none"):
        from millrace.text.answer_formats import check_names

        check_names(model.tool_format, model.reasoning_format)


def check_files(config: Config) -> None:
    """Check the keys file and the certificate before anything is loaded."""
    server = config.server
    if server.keys_file:
        from pathlib import Path

        from millrace.serve.tenancy.keyring import read_tenants

        read_tenants(Path(server.keys_file))
    if server.tls_cert or server.tls_key:
        from millrace.serve.app import tls_context

        tls_context(config)


def check_port(host: str, port: int) -> None:
    """Check that the port is free before anything is loaded."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Without SO_REUSEADDR, a port with connections in TIME_WAIT would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port or --host.",
                param="server.port",
            ) from error
