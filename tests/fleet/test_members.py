"""One process of a fleet, apart from the others."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from millrace.fleet.member import Member
from millrace.fleet.settings import FleetSettings

pytestmark = pytest.mark.live


def test_a_member_that_is_told_to_end_while_its_process_is_made_leaves_none(tmp_path: Path) -> None:
    async def check() -> None:
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        notes: list[str] = []
        member = Member(
            *("r0", "replica", "http://127.0.0.1:9", command, tmp_path / "log", FleetSettings()),
            lambda name, event, **facts: notes.append(event),
            lambda: None,
        )
        keeping = asyncio.create_task(member.keep())
        while not (tmp_path / "log").exists():
            await asyncio.sleep(0)
        assert member.state.pid == 0, "the process is being made"
        await member.end()
        await asyncio.wait_for(keeping, 60)
        assert member.state.pid == 0
        assert "ended" in notes

    asyncio.run(check())
