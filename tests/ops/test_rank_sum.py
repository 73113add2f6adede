"""The kernel that sums over ranks: each finds the others' numbers of its own turn, and adds them in their order."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_mode import device

from millrace.ops.triton import rank_sum

SLOT = 2 * rank_sum.CHUNK


class Ranks:
    """Ranks one after the other: what the later ones would write is there before the first one looks."""

    def __init__(self, size: int) -> None:
        self.slots = torch.zeros((2, size, SLOT), dtype=torch.int64, device=device)
        self.lost = torch.zeros(1, dtype=torch.int32, device=device)
        self.turns = [rank_sum.new_turns(SLOT, device) for _ in range(size)]
        self.turn = 0

    def sums(self, numbers: list[torch.Tensor]) -> list[torch.Tensor]:
        self.turn += 1
        slots = self.slots[self.turn % 2]
        before = slots.clone()
        for rank, own in enumerate(numbers):
            slots[rank, : len(own)] = own.view(torch.int32).long() & 0xFFFFFFFF | self.turn << 32
        written = slots.clone()
        found = []
        for rank, own in enumerate(numbers):
            slots[rank] = before[rank]
            out = torch.full_like(own, torch.nan)
            rank_sum.exchange(own, out, self.slots, self.turns[rank], self.lost, rank)
            assert torch.equal(slots, written), "each rank writes its numbers with the turn"
            found.append(out)
        return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_sum_in_the_order_of_ranks(size: int) -> None:
    for counts in ((1, 576, 3), (rank_sum.CHUNK + 7, SLOT)):
        ranks = Ranks(size)
        for count in counts:
            numbers = [torch.randn(count, device=device) * 10**rank for rank in range(size)]
            for found in ranks.sums(numbers):
                assert torch.equal(found, sum(numbers[1:], numbers[0]))


def test_negative_numbers_and_zeros_keep_their_bits() -> None:
    numbers = [torch.tensor([-1.5, -0.0, 3.4e38, 1e-40], device=device), torch.zeros(4, device=device)]
    assert [found.tolist() for found in Ranks(2).sums(numbers)] == [numbers[0].tolist()] * 2


def test_nobody_waits_for_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sum, "LOOKS", 2)
    ranks = Ranks(2)
    ranks.lost.fill_(1)
    own, out = torch.ones(5, device=device), torch.zeros(5, device=device)
    rank_sum.exchange(own, out, ranks.slots, ranks.turns[0], ranks.lost, 0)
    assert out.tolist() == [1.0] * 5
