"""The files of an engine: its Unix socket and the reason why it failed. Also the creation of sockets."""

from __future__ import annotations

import os
import socket

from millrace.errors import ConfigError

MAX_PATH_BYTES = 107
"""Limit of the kernel for the path of a Unix socket."""
SOCKET_BYTES = 1 << 22
"""Requested send buffer. The kernel may grant less."""


def engine_path(directory: str) -> str:
    """Path of the engine's socket in its directory, which only its owner can access."""
    path = os.path.join(directory, "engine")
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"The path of the engine's socket, {path}, has {length} bytes; at most {MAX_PATH_BYTES} are possible. "
            "Set TMPDIR to a directory with a shorter name."
        )
    return path


def failure_path(directory: str) -> str:
    """Path of the file in which an engine that failed leaves the reason. The same message over the socket may come too
    late or not at all if its front is still starting."""
    return os.path.join(directory, "failure")


def unix_socket() -> socket.socket:
    """A non-blocking socket with large buffers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return with_large_buffers(sock)


def with_large_buffers(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return sock
