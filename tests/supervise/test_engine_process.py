"""An engine process: why it failed to start reaches its parent in every case."""

from __future__ import annotations

import asyncio

import pytest

from millrace.config import Config, replace
from millrace.supervise.engine_process import EngineProcess
from millrace.supervise.spare_engine import SpareEngine


async def _message_at_death(engine: EngineProcess) -> str:
    death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine.watch(asyncio.get_running_loop(), death.set_result)
    return await asyncio.wait_for(death, 60)


@pytest.mark.parametrize("is_spare", [False, True])
def test_the_reason_is_known_even_if_no_front_ever_connects(is_spare: bool) -> None:
    spare = SpareEngine(1)
    if is_spare:
        spare.prepare()
    waiting = spare.take()
    assert (waiting is not None) == is_spare
    engine = EngineProcess(replace(Config(), model__source="/no/such/model"), waiting)
    assert waiting is None or engine.process is waiting.process
    try:
        assert "/no/such/model" in asyncio.run(_message_at_death(engine))
    finally:
        engine.stop()


def test_a_spare_that_has_ended_is_replaced() -> None:
    spare = SpareEngine(1)
    try:
        spare.prepare()
        first = spare._waiting
        spare.prepare()
        assert spare._waiting is first, "one is enough"
        assert first is not None
        first.process.kill()
        first.process.wait()
        assert spare.take() is None
        spare.prepare()
        second = spare._waiting
        assert second is not None
        second.process.kill()
        second.process.wait()
        engine = EngineProcess(replace(Config(), model__source="/no/such/model"), second)
        assert engine.process is not second.process, "it ended before its settings arrived"
        engine.kill()
        engine.stop()
    finally:
        spare.close()
    assert spare.take() is None
