"""Where a server keeps what outlives a request: in a directory of its own, or in one that `--data-dir` shares."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from millrace.config import ServerConfig, data_dir
from millrace.errors import ConfigError

DATABASE = "store.sqlite3"
LOCK = "server.lock"
_DEFAULT_PORT = ServerConfig().port


def data_directory(server: ServerConfig, model_name: str) -> Path:
    """`--data-dir`, or a directory with the server's name: by default its first model, and its port unless that is the
    default one."""
    if server.data_dir:
        return Path(server.data_dir).expanduser()
    by_default = model_name if server.port == _DEFAULT_PORT else f"{model_name}-{server.port}"
    return _own_directory(server.name or by_default)


def canary_file(server: ServerConfig, first_name: str, model_name: str) -> Path:
    """Of one model of one server, also where several share the directory."""
    name = re.sub(r"[^\w.-]", "_", f"{server.name or server.port}-{model_name}")
    return data_directory(server, first_name) / f"canaries-{name}.jsonl"


def other_data(server: ServerConfig, model_name: str) -> str:
    """A sentence for a server whose model has data, but in the directory of another server; else empty. Up to version
    0.1 all servers of a model used the one of the default port."""
    own, other = data_directory(server, model_name), _own_directory(model_name)
    if server.data_dir or own == other or (own / DATABASE).exists() or not (other / DATABASE).exists():
        return ""
    return (
        f"Files, batches and responses are stored in {own}. Those in {other} belong to the server on port"
        f" {_DEFAULT_PORT} or were stored by an earlier version: --data-dir shares them."
    )


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keeps other servers out of the directory, and removes it at the end if nothing was stored."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(directory))
        except OSError:
            pass  # Nothing can be stored here: requests that try get the reason.
        yield


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout  # 20 ms to import.

    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"Another server stores its files, batches and responses in {directory}. Give this one another --name, or"
            f" share the directory with --data-dir {directory}.",
            param="server.name",
        ) from None
    try:
        yield
    finally:
        if not (directory / DATABASE).exists():
            with contextlib.suppress(OSError):
                (directory / LOCK).unlink()
                directory.rmdir()
        lock.release()


def _own_directory(name: str) -> Path:
    return data_dir() / re.sub(r"^\.|[^\w.-]", "_", name)
