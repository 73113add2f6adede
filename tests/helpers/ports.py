"""Ports for programs that are told their port: free, and not given by the kernel to anything else meanwhile."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, NUMBER = 20_000, 12_000
"""Below the ports that the kernel chooses from for whoever asks for any (from 32768 on)."""
_counted = itertools.count()


def free_port() -> int:
    """Another one each time; another test process begins elsewhere."""
    for number in itertools.islice(_counted, NUMBER):
        port = FIRST + (os.getpid() * 97 + number) % NUMBER
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")
