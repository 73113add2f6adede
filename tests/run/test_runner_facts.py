"""What a runner declares holds together."""

from __future__ import annotations

import pytest

from millrace.run.facts import RunnerFacts


def test_a_ring_has_more_buffers_than_steps_are_in_flight() -> None:
    assert RunnerFacts(3, ring_size=4).steps_in_flight == 3
    assert RunnerFacts(4).ring_size is None
    with pytest.raises(ValueError, match="4 steps in flight need a ring of more than 4 buffers"):
        RunnerFacts(4, ring_size=4)
