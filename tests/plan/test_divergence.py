"""Where a prompt leaves the cache is compared when somebody asks, with what was cached when it was admitted."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.plan import divergence as module
from millrace.plan.divergence import MAX_TOKENS_KEPT, TOKENS_AROUND, Divergence, nearest
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Blocks that were compared token by token."""
    found: list[bytes] = []
    count = module.num_common

    def noted(own: bytes, cached: bytes) -> int:
        found.append(cached)
        return count(own, cached)

    monkeypatch.setattr(module, "num_common", noted)
    return found


def as_bytes(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def run(scheduler: Scheduler, request: Request) -> None:
    scheduler.submit(request)
    while (plan := scheduler.plan(request.arrival)) is not None:
        scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 9, np.int32))


def test_an_admission_compares_nothing_until_it_is_explained_and_then_once(compared: list[bytes]) -> None:
    scheduler = Scheduler(SchedulerSettings(num_blocks=40, block_size=4, max_running=1, token_budget=64))
    shared = list(range(10, 18))
    requests = [
        Request(id=number, prompt=np.array([*shared, *own], np.int32), max_tokens=1)
        for number, own in enumerate(([1, 2, 3, 4, 5], [1, 2, 7, 8, 9], [1, 2, 3, 6, 9]))
    ]
    for request in requests:
        run(scheduler, request)
    assert not compared
    diagnostics = requests[2].diagnostics
    for _ in range(3):
        assert diagnostics.diverged is not None
        assert diagnostics.diverged.at == 11, "the first prompt is nearer than the second, which came later"
        assert np.frombuffer(diagnostics.diverged.around, np.int32).tolist() == requests[2].prompt.tolist()
    assert len(compared) == 2
    assert requests[0].diagnostics.diverged is None, "nothing was cached"


def test_only_blocks_that_can_agree_longer_are_compared_token_by_token(compared: list[bytes]) -> None:
    """Where prompts begin in many ways, no more than the beginning of each is read."""
    assert nearest(as_bytes(20, 20), [as_bytes(number, number) for number in range(8)]) == (0, as_bytes(0, 0))
    assert len(compared) == 1
    assert nearest(as_bytes(1), []) == (-1, b"")
    assert nearest(as_bytes(1, 2, 3), [as_bytes(1, 9, 9), as_bytes(1, 2, 9)]) == (2, as_bytes(1, 2, 9))


def test_a_prompt_that_equals_what_is_cached_diverges_nowhere() -> None:
    cached = [as_bytes(1, 2, 3, 4)]
    assert Divergence(as_bytes(1, 2, 3), 0, 4, cached).found() is None
    assert Divergence(as_bytes(1, 2, 3, 4, 5), 0, 4, cached).found() is None


def test_long_prompts_are_compared_at_once_and_not_kept(compared: list[bytes]) -> None:
    history = as_bytes(*range(MAX_TOKENS_KEPT + 1))
    found = Divergence(history, 512, 4, [as_bytes(512, 513, 0, 0)])
    assert len(compared) == 1
    diverged = found.found()
    assert diverged is not None
    assert (diverged.at, diverged.around_from) == (514, 514 - TOKENS_AROUND)
    assert len(compared) == 1
    assert len(diverged.around) == 4 * 2 * TOKENS_AROUND
