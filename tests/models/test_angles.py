"""Rotary tables: bit-equal to computed angles, and rebuilt only when they must grow."""

from __future__ import annotations

import torch

from millrace.models.angles import FIRST_POSITIONS, Angles
from millrace.models.spec.model_spec import RopeSpec
from millrace.models.spec.rope import inverse_frequencies

ROPES = (RopeSpec(8, 10000.0), RopeSpec(16, 500000.0, "yarn", factor=4.0, original_context=64, attention_factor=1.2))


def test_lookups_equal_computed_angles() -> None:
    angles = Angles(ROPES, [inverse_frequencies(rope) for rope in ROPES])
    positions = torch.tensor([0, 1, 7, 1023, 512, 7])
    for table, rows, rope in zip(angles.upto(1024), angles.of(positions), ROPES, strict=True):
        assert table.shape == (FIRST_POSITIONS, rope.rotary_dim)
        assert torch.equal(table[positions], rows)


def test_tables_are_rebuilt_only_when_they_grow() -> None:
    angles = Angles(ROPES[:1], [inverse_frequencies(ROPES[0])])
    first = angles.upto(3)
    assert angles.upto(FIRST_POSITIONS) is first
    (longer,) = angles.upto(FIRST_POSITIONS + 1)
    assert longer.shape[0] == 2 * FIRST_POSITIONS
    assert torch.equal(longer[:FIRST_POSITIONS], first[0])


def test_a_model_without_ropes_has_no_tables() -> None:
    assert Angles((), ()).upto(9) == []
