"""Waits for a condition on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds, while the loop keeps running."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)
