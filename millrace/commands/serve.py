"""`millrace serve`: starts an engine and one or more fronts, and prints a request to paste when they are ready.

This process is front 0 and never imports torch; the engine is a child process (with --in-process, a thread).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from millrace.config import Config, num_fronts, replace
from millrace.errors import ConfigError, EngineUnavailable, MillraceError
from millrace.terminal.running_servers import Announcement, announced, read_settings
from millrace.terminal.settings_options import add_model, add_settings, given_settings, load_settings
from millrace.terminal.startup_message import reachable_url
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.link.client import EngineClient
    from millrace.link.messages import EngineLoading, EngineReady
    from millrace.serve.app import FrontState
    from millrace.supervise.engine_process import EngineHandle
    from millrace.supervise.engine_supervisor import EngineSupervisor
    from millrace.supervise.fronts import Fronts

USAGE = "millrace serve [MODEL] [options]"
EXAMPLES = """\
examples:
  millrace serve                                       the default model on http://127.0.0.1:8000
  millrace serve qwen2.5-coder-1.5b --port 8123        a model known by name (see millrace models)
  millrace serve ./my-model --dtype float32            a Hugging Face directory
  millrace serve my-model.gguf --kv-gib 2              a GGUF file, with 2 GiB for the KV pool
  millrace serve org/name --config my.toml             a Hugging Face id, with settings from a file
  millrace serve random:config.json                    random weights of this shape, for benchmarks
  millrace serve --keys-file keys.toml                 require API keys (millrace keys creates them)
  millrace serve --tls-cert cert.pem --tls-key key.pem serve HTTPS"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_settings(parser)
    parser.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="accepted for compatibility with vLLM: tool calls are always recognised",
    )


def run(args: argparse.Namespace) -> int:
    from millrace.observe.logs import setup_logging

    config = load_settings(args).config
    setup_logging(config.observe.log_level, process="front")
    with announced(given_settings(args), args.config) as announcement:
        Server(config, announcement).run()
    return 0


class Server:
    """Starts and stops everything that belongs to one server."""

    def __init__(self, config: Config, announcement: Announcement) -> None:
        self._started = time.monotonic()
        check_port(config.server.host, config.server.port)
        check_files(config)
        self._config = replace(config, server__fronts=num_fronts(config, len(os.sched_getaffinity(0))))
        self._failure = ""
        self._is_ready = False
        self._line = StatusLine()
        self._announcement = announcement
        self._stop = asyncio.Event()

    def run(self) -> None:
        """Serve until a signal. Raises if the engine could not start or kept dying."""
        from millrace.supervise.engine_process import start_engine
        from millrace.supervise.engine_supervisor import EngineSupervisor
        from millrace.terminal.model_download import obtain_model

        obtain_model(self._config.model.source, offline=self._config.model.offline)
        # Start the engine first: its imports take longest and run in parallel with everything below.
        supervisor = EngineSupervisor(self._config, start_engine(self._config))
        try:
            import uvloop

            with tempfile.TemporaryDirectory(prefix="millrace-server-") as directory:
                uvloop.run(self._serve(supervisor, directory))
        finally:
            self._end(supervisor.engine)
        if self._failure:
            raise EngineUnavailable(self._failure)

    def _end(self, engine: EngineHandle) -> None:
        """Kill an engine that is still loading: it has nothing to finish and would not react before it is ready."""
        if not self._is_ready:
            engine.kill()
        engine.stop()

    async def _serve(self, supervisor: EngineSupervisor, directory: str) -> None:
        from millrace.serve.app import calm_collector, listening_socket, load_state, serve_front
        from millrace.sources.resolve import resolve_model
        from millrace.supervise.fronts import Fronts
        from millrace.supervise.reload import Reloader

        server = self._config.server
        sock = listening_socket(server.host, server.port, self._config, reuse_port=server.fronts > 1)
        self._config = replace(self._config, server__port=sock.getsockname()[1])
        client = self._connect(supervisor.engine)
        fronts = Fronts(self._config, directory, supervisor.engine)
        supervisor.watch(client, on_replaced=fronts.announce_engine, on_given_up=self._end_with)
        tasks: list[asyncio.Task[None]] = []
        try:
            files = resolve_model(self._config.model.source)
            state = load_state(self._config, client, files, directory=directory)
            fronts.watch(state)
            reloader = Reloader(state, fronts, self._read_settings, lambda _: self._on_reloaded(state))
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.reload)
            calm_collector()
            tasks = [asyncio.create_task(self._announce(state)), asyncio.create_task(self._on_stop(state, fronts))]
            await serve_front(state, server.host, self._config.server.port, sock=sock, stop=self._stop)
            if state.stopped_at_once:
                fronts.kill()
        finally:
            supervisor.close()
            for task in tasks:
                task.cancel()
            await client.close()
            await asyncio.to_thread(fronts.stop, server.drain_timeout_s)

    def _connect(self, engine: EngineHandle) -> EngineClient:
        from millrace.link.client import EngineClient
        from millrace.supervise.front_child import max_open_requests

        self._line.show("starting the engine")
        return EngineClient(
            engine.channel(0),
            max_open=max_open_requests(self._config),
            on_loading=self._show_loading,
        )

    def _show_loading(self, stage: EngineLoading) -> None:
        if not self._is_ready:
            self._line.show(stage.what, stage.done, stage.total)

    async def _announce(self, state: FrontState) -> None:
        """Print that the server is ready, or end with the reason if the engine could not start."""
        from millrace.terminal.startup_message import memory_table, open_server_warning, ready_lines

        try:
            ready = await state.client.wait_ready()
        except EngineUnavailable as error:
            self._end_with(error.message)
            return
        self._is_ready = True
        self._line.clear()
        server, url = self._config.server, server_url(self._config)
        self._list_server(state.config, ready)
        needs_key = bool(server.keys_file)
        warning = "" if needs_key else open_server_warning(server.host)
        if warning:
            print(warning, file=sys.stderr, flush=True)
        took_s = time.monotonic() - self._started
        lines = ready_lines(ready, url, took_s, is_chat=is_chat_model(state), needs_key=needs_key)
        for text in (*memory_table(ready), *lines):
            print(text, flush=True)

    def _list_server(self, config: Config, ready: EngineReady) -> None:
        """Make the server known to `millrace ps`, `stop` and `reload`."""
        self._announcement.write(ready.model_name, server_url(config), ready.device, config)

    def _on_reloaded(self, state: FrontState) -> None:
        if state.client.ready is not None:
            self._list_server(state.config, state.client.ready)

    def _read_settings(self) -> Config:
        return read_settings(self._announcement.settings_file, self._announcement.options)

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


def num_requests(state: FrontState) -> int:
    """Requests of all fronts as the engine last reported them; at least this front's own."""
    stats = state.client.stats
    return max(len(state.jobs), stats.running + stats.waiting if stats is not None else 0)


def draining_line(num_open: int, timeout_s: float) -> str:
    if not num_open:
        return "Stopping: no requests are running."
    requests = "1 request" if num_open == 1 else f"{num_open:,} requests"
    return f"Draining: {requests} running, up to {timeout_s:g} s. Press Ctrl-C again to stop now."


def is_chat_model(state: FrontState) -> bool:
    try:
        state.template.render([{"role": "user", "content": "Hello"}])
    except MillraceError:
        return False
    return True


def check_files(config: Config) -> None:
    """Check the formats' names, the keys file and the certificate before anything is loaded."""
    server, model = config.server, config.model
    if model.tool_format != "auto" or model.reasoning_format not in ("auto", "none"):
        from millrace.text.answer_formats import check_names

        check_names(model.tool_format, model.reasoning_format)
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
