"""Which Millrace servers run on this machine: each writes a small file while it serves."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from millrace.config import Config, as_dict, cache_dir, from_dict, load_config
from millrace.errors import NotFound
from millrace.model_settings import settings_of_models
from millrace.settings_changes import ServerSettings
from millrace.sources.default_name import default_name
from millrace.sources.names import expand_alias


@dataclass(frozen=True, slots=True)
class RunningServer:
    pid: int
    started_ticks: int
    """Start of the process in clock ticks since boot: tells it from a later process with the same id."""
    since: float
    """Seconds since the epoch."""
    model: str
    url: str
    device: str
    settings: dict[str, dict[str, object]]
    """As they are in effect."""
    options: dict[str, object]
    """Settings that its command line gave, by key."""
    settings_file: str
    """Absolute path; empty if its command line named none."""
    sources: list[str] = field(default_factory=list)
    """Models that its command line named."""
    models: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)
    """The settings of each model as they are in effect, by name."""

    def running_settings(self) -> ServerSettings:
        models = {name: from_dict(settings) for name, settings in self.models.items()}
        return ServerSettings(from_dict(self.settings), models)

    def read_settings(self) -> ServerSettings:
        """The settings that it would reload now."""
        return read_settings(self.settings_file, self.options, self.sources)


def read_settings(settings_file: str, options: Mapping[str, object], sources: Sequence[str]) -> ServerSettings:
    loaded = load_config(Path(settings_file) if settings_file else None, options)
    models = settings_of_models(loaded, sources, default_name)
    return ServerSettings(loaded.config, {model.name: model.config for model in models})


def running_servers() -> list[RunningServer]:
    """Servers whose process is alive; files of dead ones are deleted."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        try:
            server = RunningServer(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if _started_ticks(server.pid) == server.started_ticks:
            found.append(server)
        else:
            path.unlink(missing_ok=True)
    return found


def server_of(source: str, *, has_key: bool) -> tuple[RunningServer, str] | None:
    """A server that runs this model, and its name there. Not one that wants a key, unless there is one, and not one
    with a certificate, which a client would have to be told."""
    for server, name in servers_of(source):
        wants_key = bool(server.settings["server"].get("keys_file"))
        if not server.url.startswith("https:") and (has_key or not wants_key):
            return server, name
    return None


def servers_of(source: str) -> Iterator[tuple[RunningServer, str]]:
    """The servers that run this model, each with its name there."""
    for server in running_servers():
        for name, settings in server.models.items():
            if _is_same_model(source, name, str(settings["model"]["source"])):
                yield server, name


def _is_same_model(source: str, name: str, served: str) -> bool:
    """`name`: of the model in the API of its server, which may have another current directory."""
    path, served_path = Path(expand_alias(source)).expanduser(), Path(expand_alias(served)).expanduser()
    if path.exists():
        return served_path.is_absolute() and served_path.exists() and served_path.samefile(path)
    return source == name or default_name(source) == default_name(served)


def choose_server(which: str) -> RunningServer:
    """The server with this model or process id; the only one if `which` is empty."""
    servers = running_servers()
    chosen = [server for server in servers if which in ("", server.model, *server.model.split(", "), str(server.pid))]
    names = ", ".join(f"{server.model} (process {server.pid})" for server in servers) or "none"
    if not chosen:
        raise NotFound(f"There is no such server on this machine. Running: {names}.")
    if len(chosen) > 1:
        raise NotFound(f"Several servers fit: {names}. Give the process id.")
    return chosen[0]


@contextlib.contextmanager
def announced(
    options: Mapping[str, object], settings_file: Path | None, sources: Sequence[str] = ()
) -> Iterator[Announcement]:
    """Gives the object with which a server makes itself known; forgets the server at the end."""
    file = str(settings_file.resolve()) if settings_file is not None else ""
    announcement = Announcement(_folder() / f"{os.getpid()}.json", options, file, time.time(), tuple(sources))
    try:
        yield announcement
    finally:
        announcement.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Announcement:
    path: Path
    options: Mapping[str, object]
    settings_file: str
    since: float
    sources: tuple[str, ...] = ()

    def write(
        self, model: str, url: str, device: str, config: Config, models: Mapping[str, Config] | None = None
    ) -> None:
        """A server also runs where this file cannot be written; `millrace ps` then does not list it."""
        pid = os.getpid()
        own = {name: as_dict(settings) for name, settings in (models or {}).items()}
        settings = (as_dict(config), dict(self.options), self.settings_file, list(self.sources), own)
        server = RunningServer(pid, _started_ticks(pid), self.since, model, url, device, *settings)
        partial = self.path.with_suffix(".partial")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(asdict(server)), encoding="utf-8")
            os.replace(partial, self.path)


def _started_ticks(pid: int) -> int:
    """0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _folder() -> Path:
    return cache_dir() / "run"
