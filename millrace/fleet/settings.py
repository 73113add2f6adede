"""The file of a fleet: which replicas to start, which run elsewhere, and the gateway in front of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from millrace.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` replicas of one model, on ports from `port` on."""

    model: str
    port: int
    name: str = ""
    """By default the model's name; several replicas are name-1, name-2 …"""
    count: int = 1
    host: str = "127.0.0.1"
    args: tuple[str, ...] = ()
    """Further options of `millrace serve`."""
    environment: dict[str, str] = {}
    """Variables of the process, such as CUDA_VISIBLE_DEVICES."""


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    directory: str = ""
    """State, logs and the gateway's list of replicas; by default .millrace-<file> beside the file."""
    start_s: float = 600.0
    """A replica that is not ready after this time is restarted."""
    silent_s: float = 30.0
    """A replica that was ready and answers nothing for this long is killed and restarted."""
    leave_s: float = 2.0
    """A rolling restart sends SIGTERM this long after a replica has left the gateway's list."""
    stop_s: float = 60.0
    """How long a process may take to end after SIGTERM."""
    back_off_s: float = 1.0
    """Wait before the first restart; doubles with each failure in a row."""
    max_back_off_s: float = 30.0
    steady_s: float = 60.0
    """A process that ran for this long starts again with the first wait."""


class Replica(msgspec.Struct, frozen=True):
    """One process to start."""

    name: str
    model: str
    host: str
    port: int
    args: tuple[str, ...]
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class FleetFile(msgspec.Struct, frozen=True):
    path: Path
    fleet: FleetSettings
    replicas: tuple[Replica, ...]
    elsewhere: tuple[dict[str, Any], ...]
    """Replicas that run already, as the gateway's settings describe them."""
    gateway: dict[str, Any] | None
    """The gateway's settings; None: start none."""

    @property
    def directory(self) -> Path:
        own = self.fleet.directory
        return Path(own).expanduser() if own else self.path.resolve().parent / f".millrace-{self.path.stem}"

    @property
    def gateway_address(self) -> tuple[str, int]:
        settings = self.gateway or {}
        return str(settings.get("host", "127.0.0.1")), int(settings.get("port", 8080))


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    fleet: FleetSettings = FleetSettings()
    serve: list[ServeSettings] = []
    replicas: list[dict[str, Any]] = []
    gateway: dict[str, Any] | Literal[False] = False
    router: dict[str, Any] | None = None


def read_fleet_file(path: Path) -> FleetFile:
    """Raises `ConfigError` with what is wrong and where."""
    try:
        tables = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Tables)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.", param="fleet") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is wrong: {error}", param="fleet") from error
    if not tables.serve and not tables.replicas:
        raise ConfigError(f"{path} names no replica; add a table [[serve]] with 'model' and 'port'.", param="serve")
    replicas = tuple(one for serve in tables.serve for one in _replicas_of(path, serve))
    gateway = tables.gateway if isinstance(tables.gateway, dict) else None
    if gateway is not None and tables.router is not None:
        gateway = {**gateway, "router": tables.router}
    file = FleetFile(path, tables.fleet, replicas, tuple(tables.replicas), gateway)
    _check(file)
    return file


def _replicas_of(path: Path, serve: ServeSettings) -> list[Replica]:
    name = serve.name or serve.model.rstrip("/").rpartition("/")[2] or serve.model
    if not _NAME.fullmatch(name):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:63] or "replica"
        if serve.name:
            raise ConfigError(f"{path}: the name {serve.name!r} may have letters, digits, '.', '_', '-'.", param="name")
    if not 1 <= serve.count <= 256:
        raise ConfigError(f"{path}: {name} has count {serve.count}; it must be from 1 to 256.", param="count")
    if not 1 <= serve.port <= 65536 - serve.count:
        raise ConfigError(f"{path}: {name} has port {serve.port}; its ports must be from 1 to 65535.", param="port")
    names = [name] if serve.count == 1 else [f"{name}-{number + 1}" for number in range(serve.count)]
    return [
        Replica(one, serve.model, serve.host, serve.port + number, serve.args, serve.environment)
        for number, one in enumerate(names)
    ]


def _check(file: FleetFile) -> None:
    taken: dict[object, str] = {}
    if file.gateway is not None:
        taken[file.gateway_address[1]] = "the gateway"
    for replica in file.replicas:
        for key, what in ((replica.name, "name"), (replica.port, "port")):
            if key in taken:
                raise ConfigError(
                    f"{file.path}: {replica.name} and {taken[key]} have the same {what}, {key}.", param=what
                )
            taken[key] = replica.name
        if "--port" in replica.args or "--host" in replica.args:
            raise ConfigError(
                f"{file.path}: {replica.name} has --port or --host in 'args'; use 'port' and 'host'.", param="args"
            )
