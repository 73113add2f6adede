"""`millrace gateway --workers N`: processes that share a port and limits, and of which one that dies is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from helpers.waiting import until

from millrace.bench.gateway.null_replica import MODEL, NullReplica
from millrace.serve.tenancy.keyring import DIGEST_PREFIX, digest_of

pytestmark = pytest.mark.live
LIMIT = 1000
NUM_ASKED = 30


def workers_of(pid: int) -> set[int]:
    """Without the process that Python starts beside them."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return {int(child) for child in children if b"spawn_main" in command_of(child)}


def command_of(pid: str) -> bytes:
    """Empty if the process has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_workers_share_a_port_and_limits_and_are_replaced(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["{DIGEST_PREFIX}{digest_of(name).hex()}"]\n{more}\n'
            for name, more in (("limited", f"tokens_per_minute = {LIMIT}"), ("operator", "operator = true"))
        )
    )

    async def check() -> None:
        async with NullReplica().running() as replica:
            command = [sys.executable, "-m", "millrace", "gateway", "--workers", "2", "--port", "0", "--probe-s", "0.1"]
            process = await asyncio.create_subprocess_exec(
                *command, "--replicas", replica, "--keys-file", str(keys), stdout=asyncio.subprocess.PIPE
            )
            try:
                assert process.stdout is not None
                url = (await asyncio.wait_for(process.stdout.readline(), 120)).decode().split()[-1]
                await use(url, process.pid)
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 60) == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def use(url: str, pid: int) -> None:
        connector = aiohttp.TCPConnector(force_close=True)  # Every connection meets one of the processes.
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask(key: str, max_tokens: int = 20) -> int:
                body = {"model": MODEL, "prompt": "Once", "max_tokens": max_tokens}
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(url + "/v1/completions", json=body, headers=headers) as answer:
                    await answer.read()
                    return answer.status

            async def are_ready() -> bool:
                return [await ask("operator") for _ in range(12)] == [200] * 12

            await until_true(are_ready)
            first = workers_of(pid)
            assert len(first) == 2
            # Each needs more than half of the limit: two processes that counted alone would admit two.
            statuses = await asyncio.gather(*(ask("limited", 600) for _ in range(NUM_ASKED)))
            assert (statuses.count(200), statuses.count(429)) == (1, NUM_ASKED - 1)
            headers = {"Authorization": "Bearer operator"}
            async with session.post(url + "/v1/fleet/replicas", json={"url": "http://x:1"}, headers=headers) as answer:
                assert answer.status == 409
                assert "2 processes" in (await answer.json())["error"]["message"]
            killed = min(first)
            os.kill(killed, signal.SIGKILL)
            await until(lambda: len(workers_of(pid) - {killed}) == 2)
            await until_true(are_ready)

    async def until_true(ask: object) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    if await ask():  # type: ignore[operator]
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    asyncio.run(check())
