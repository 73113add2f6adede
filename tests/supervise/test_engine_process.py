"""An engine process: why it failed to start reaches its parent in every case."""

from __future__ import annotations

import asyncio

from millrace.config import Config, replace
from millrace.supervise.engine_process import EngineProcess


async def _message_at_death(engine: EngineProcess) -> str:
    death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine.watch(asyncio.get_running_loop(), death.set_result)
    return await asyncio.wait_for(death, 60)


def test_the_reason_is_known_even_if_no_front_ever_connects() -> None:
    engine = EngineProcess(replace(Config(), model__source="/no/such/model"))
    try:
        assert "/no/such/model" in asyncio.run(_message_at_death(engine))
    finally:
        engine.stop()
