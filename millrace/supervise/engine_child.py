"""Main module of the engine process: `python -m millrace.supervise.engine_child DIRECTORY NUM_FRONTS [spare]`.

Reads one JSON line of settings from standard input; stops when standard input closes. A spare imports everything before
it reads. The process is named after what it is, for `ps` and `top`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path

from millrace.config import from_dict
from millrace.engine.lifetime import serve_engine
from millrace.host.idle_memory import IdleCollector
from millrace.host.time_slice import request_default_slices
from millrace.link.address import failure_path
from millrace.link.engine_end import SocketEngineChannel
from millrace.observe.logs import setup_logging

ORPHAN_GRACE_S = 10.0
GARBAGE_THRESHOLDS = (50_000, 20, 50)
"""A step makes many small objects and no cycles; Python's default of a collection every 700 objects is too often."""
SWITCH_S = 0.0002
"""On a CPU the thread that runs steps needs the interpreter back while the previous step's tokens are still being sent;
the default would make it wait up to 5 ms."""
ENGINE_NAME, SPARE_NAME = "millrace-engine", "millrace-spare"
HUNG = 75
"""Exit code of an engine whose step never ended."""


def main() -> None:
    request_default_slices()  # The front that starts us has short slices, which children inherit.
    directory, num_fronts = sys.argv[1], int(sys.argv[2])
    if "spare" in sys.argv[3:]:
        _name_process(SPARE_NAME)
        import millrace.engine.build  # noqa: F401
    line = sys.stdin.buffer.readline()
    if not line:
        return  # The server ended before it needed this process.
    _name_process(ENGINE_NAME)
    config = from_dict(json.loads(line))
    setup_logging(config.observe.log_level, process="engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
    channel = SocketEngineChannel(directory, num_fronts)
    threading.Thread(target=_stop_with_parent, args=(channel,), name="parent-watch", daemon=True).start()
    failure = serve_engine(config, channel, on_hang=lambda: os._exit(HUNG), on_idle=IdleCollector())
    if failure is not None:
        with contextlib.suppress(FileNotFoundError):  # The server has ended, and its directory with it.
            Path(failure_path(directory)).write_text(failure, encoding="utf-8")
    channel.close()


def _name_process(name: str) -> None:
    """At most 15 bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")


def _stop_with_parent(channel: SocketEngineChannel) -> None:
    """The pipe closes when the parent ends or stops the engine. An engine still busy after the grace time exits.

    Reads the pipe itself: an interpreter that shuts down while a thread waits in `sys.stdin` aborts."""
    while os.read(0, 4096):
        pass
    channel.request_stop()
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
