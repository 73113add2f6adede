"""Where an engine's socket is, and the sockets themselves."""

from __future__ import annotations

import os
import socket

from millrace.errors import ConfigError

LONGEST_PATH = 107
"""Bytes that the kernel takes as the path of a Unix socket."""
SOCKET_BYTES = 1 << 22
"""Asked for as each socket's buffer; the kernel gives as much of it as the machine allows."""


def engine_path(directory: str) -> str:
    """The engine's socket in its directory, which is reachable for its owner only."""
    path = os.path.join(directory, "engine")
    length = len(os.fsencode(path))
    if length > LONGEST_PATH:
        raise ConfigError(
            f"The path of the engine's socket, {path}, has {length} bytes, and at most {LONGEST_PATH} are possible: "
            "set TMPDIR to a directory with a shorter name."
        )
    return path


def unix_socket() -> socket.socket:
    """One that never blocks and takes a lot at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return with_large_buffers(sock)


def with_large_buffers(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return sock
