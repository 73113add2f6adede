"""Builds an engine and runs it until it stops, in the calling thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millrace.config import Config
from millrace.errors import MemoryPlanError, MillraceError
from millrace.host.early_context import create_context_early
from millrace.link.channel import EngineChannel
from millrace.link.messages import EngineFailed
from millrace.run.graphs.kernel_build_pool import start_build_pool

log = logging.getLogger(__name__)


def serve_engine(
    config: Config,
    channel: EngineChannel,
    on_hang: Callable[[], None] | None = None,
    on_idle: Callable[[], None] | None = None,
) -> str | None:
    """Build the engine and run it until it stops. Returns the reason if it failed, after sending it to every front as
    `EngineFailed`."""
    build_pool = start_build_pool(config)
    create_context_early(config.run)
    from millrace.engine.build import build_engine  # Imports torch, which takes seconds: the steps above run meanwhile.

    try:
        engine, ready = build_engine(config, channel, build_pool)
        engine.ready, engine.on_hang = ready, on_hang
        if on_idle is not None:
            engine.on_idle = on_idle
        channel.send_all(ready)
        engine.run()
        return None
    except Exception as error:
        message = error.message if isinstance(error, MillraceError) else f"The engine failed: {error!r}"
        if not isinstance(error, MillraceError):
            log.exception("the engine failed")
        channel.send_all(EngineFailed(message, isinstance(error, MemoryPlanError)))
        return message
    finally:
        if build_pool is not None:
            build_pool.close()
