"""A short drill of a gateway over real processes: kill -9, SIGSTOP, and a proxy that drops and corrupts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import aiohttp
import pytest
from helpers.gateways import gateway_over
from helpers.served import command_line, wait_until
from helpers.waiting import until

from millrace.bench.gateway.null_replica import NullReplica, answer_text
from millrace.bench.local_server import descendants
from millrace.faults.gateway_drill import GATEWAY_KINDS, drill
from millrace.faults.proxy import FaultyProxy
from millrace.gateway.settings import ReplicaSettings

pytestmark = pytest.mark.live


def test_no_stream_is_lost_and_no_token_wrong() -> None:
    """A short soak: each fault once, and a second kill."""
    kinds = ("kill", "stop", "drop", "corrupt", *GATEWAY_KINDS)
    result = asyncio.run(drill(0.0, 4, 1, kinds, num_kills=2))
    assert result.failures() == []
    assert result.num_right > 0
    assert {kind: result.num_faults[kind] for kind in kinds} == {**dict.fromkeys(kinds, 1), "kill": 2}


@pytest.mark.parametrize("fault", ["drop", "corrupt"])
def test_stream_through_a_faulty_connection_goes_on_elsewhere(fault: str) -> None:
    async def check() -> None:
        behind, well = NullReplica(token_ms=10), NullReplica(token_ms=10)
        async with behind.running() as url:
            proxy = FaultyProxy("127.0.0.1", int(url.rpartition(":")[2]))
            async with proxy.running() as outer, well.running() as other:
                members = (ReplicaSettings(outer, name="faulty"), ReplicaSettings(other, name="well"))
                async with gateway_over(*members, policy="round-robin") as gateway:
                    streams = [asyncio.create_task(gateway.stream(f"{n}", max_tokens=60)) for n in range(4)]
                    await until(lambda: behind.num_open == 2)
                    attempts = gateway.state.fleet.replicas["faulty"].attempts
                    await until(lambda: all(one.num_frames > 3 for one in attempts))
                    proxy.fault = fault  # type: ignore[assignment]
                    seen = await asyncio.gather(*streams)
                    assert [one.text for one in seen] == [answer_text(f"{n}", 60) for n in range(4)]
                    assert proxy.num_faults > 0

    asyncio.run(check())


def test_proxy_passes_on_what_it_is_not_told_to_break() -> None:
    async def check() -> None:
        async with NullReplica().running() as url:
            proxy = FaultyProxy("127.0.0.1", int(url.rpartition(":")[2]))
            async with proxy.running() as outer, aiohttp.ClientSession() as session:
                async with session.get(outer + "/v1/models") as answer:
                    assert answer.status == 200
                proxy.fault = "drop"
                with pytest.raises(aiohttp.ClientError):
                    async with session.get(outer + "/v1/models") as answer:
                        await answer.read()

    asyncio.run(check())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drill_that_is_told_to_end_ends_its_processes(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "millrace", "faults", "gateway", "--kills", "1000", "--clients", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    family: list[int] = []
    try:
        wait_until(lambda: len(descendants(process.pid)) >= 4, "its replicas and a gateway run", 120.0)
        family = descendants(process.pid)
        process.send_signal(number)
        assert process.wait(60) != 0
        wait_until(lambda: not any(map(command_line, family)), "its processes have ended")
    finally:
        for pid in [process.pid, *family]:
            if command_line(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
