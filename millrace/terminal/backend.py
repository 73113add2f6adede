"""Where `chat` and `generate` get their answers: a model in this process, or a server."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from millrace.config import LoadedConfig
from millrace.terminal.sampling_options import AnswerStats, SamplingFields


class Backend(Protocol):
    """Closing an iterator before its end stops the generation."""

    model_name: str
    last: AnswerStats

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], fields: SamplingFields) -> Generator[str]: ...

    def stream_text(self, prompt: str, fields: SamplingFields) -> Generator[str]: ...

    def takes_images(self) -> bool:
        """False if the model cannot see; True also where a server does not say."""
        ...

    def close(self) -> None: ...


def open_backend(loaded: LoadedConfig, url: str, api_key: str, *, finds_server: bool = False) -> Backend:
    """The server at `url`, or without one the configured model, loaded into this process. `finds_server`: rather ask a
    server of this machine that has loaded the model."""
    model = loaded.config.model.source if loaded.sources["model.source"] != "default" else ""
    if finds_server and not url:
        from millrace.terminal.running_servers import server_of

        found = server_of(loaded.config.model.source, has_key=bool(api_key))
        if found is not None:
            server, model = found
            url = server.url
            print(f"Using the server on {url} (process {server.pid}).", file=sys.stderr, flush=True)
    if url:
        from millrace.terminal.remote_backend import RemoteBackend

        return RemoteBackend(url, model, api_key)
    from millrace.terminal.local_backend import LocalBackend

    return LocalBackend(loaded.config)
