"""An engine process: why it failed to start reaches its parent in every case."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers.tiny_server import tiny_source

from millrace import cli
from millrace.config import Config, replace
from millrace.errors import EngineUnavailable
from millrace.supervise import engine_process, spare_engine
from millrace.supervise.engine_process import EngineChild, EngineProcess
from millrace.supervise.spare_engine import SpareEngine

pytestmark = pytest.mark.live


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


def test_a_process_that_ends_before_it_reads_its_settings_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = engine_process.start_child

    def ended(num_fronts: int) -> EngineChild:
        child = start(num_fronts)
        child.process.kill()
        child.process.wait()
        return child

    monkeypatch.setattr(engine_process, "start_child", ended)
    says = "The engine process ended with code -9 before it had read its settings"
    for spare in (None, ended(1)):
        with pytest.raises(EngineUnavailable, match=says):
            EngineProcess(replace(Config(), model__source="/no/such/model"), spare)
    assert cli.main(["serve", tiny_source(tmp_path), "--port", "0"]) == 1
    assert capfd.readouterr().err.splitlines()[-1] == f"millrace: {says}."


def test_a_spare_that_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineChild] = []
    start = spare_engine.start_child

    def recorded(num_fronts: int, *, is_spare: bool) -> EngineChild:
        started.append(start(num_fronts, is_spare=is_spare))
        return started[-1]

    monkeypatch.setattr(spare_engine, "start_child", recorded)
    spare = SpareEngine(1)
    try:
        spare.prepare()
        spare.prepare()
        [first] = started
        first.process.kill()
        first.process.wait()
        assert spare.take() is None
        spare.prepare()
        second = spare.take()
        assert second is started[1]
        second.process.kill()
        second.process.wait()
        engine = EngineProcess(replace(Config(), model__source="/no/such/model"), second)
        assert engine.process is not second.process, "it ended before its settings arrived"
        engine.kill()
        engine.stop()
    finally:
        spare.close()
    assert spare.take() is None
