"""What an engine reports once its work is done."""

from __future__ import annotations

from helpers.inside import client_of
from helpers.served import wait_until

from millrace import LLM
from millrace.link.engine_stats import EngineStats


def stats_after(llm: LLM, num_requests: int) -> EngineStats:
    """The statistics in which so many requests have ended and none runs: an engine that becomes idle reports."""

    def is_done() -> bool:
        stats = client.stats
        if stats is None or client.num_open or stats.running or stats.waiting:
            return False
        return sum(stats.finished.values()) >= num_requests

    client = client_of(llm)
    wait_until(is_done, f"the end of {num_requests} requests")
    stats: EngineStats = client.stats
    return stats
