"""Token counts of rows with penalties, in slots allocated on demand; other rows cost nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.params.draws import DrawParams
from millrace.plan.step import Int32s

NO_DRAFT = -1
"""In a column of drafts: there is none before this draw."""


class Penalties:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._in_output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []

    def admit(self, row: int, known: Int32s, num_prompt: int) -> None:
        """Count a row's tokens; those of a request resumed after preemption include its output."""
        slot = self._take(row)
        tokens = torch.from_numpy(known).to(self._device).long()
        prompt, output = tokens[:num_prompt], tokens[num_prompt:]
        self._in_prompt[slot] = False
        self._in_prompt[slot, prompt] = True
        self._in_output[slot] = torch.bincount(output, minlength=self._vocab_size).to(torch.int32)

    def release(self, row: int) -> None:
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def apply(self, logits: Tensor, index: int, row: int, params: DrawParams) -> None:
        """Apply the penalties to row `index` of the logits, in place: repetition, then presence and frequency."""
        slot = self._slot_of[row]
        values, counts = logits[index], self._in_output[slot]
        produced = counts > 0
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            weakened = torch.where(values > 0, values / penalty, values * penalty)
            torch.where(produced | self._in_prompt[slot], weakened, values, out=values)
        values -= params.frequency_penalty * counts + params.presence_penalty * produced

    def count(self, row: int, token: Tensor | int, times: int = 1) -> None:
        """Count a token drawn for the row; it may still be on the device."""
        self._in_output[self._slot_of[row], token] += times

    def _take(self, row: int) -> int:
        if row not in self._slot_of:
            if not self._free:
                self._grow()
            self._slot_of[row] = self._free.pop()
        return self._slot_of[row]

    def _grow(self) -> None:
        old, extra = len(self._in_prompt), max(4, len(self._in_prompt))
        shape = (extra, self._vocab_size)
        self._in_prompt = torch.cat([self._in_prompt, torch.zeros(shape, dtype=torch.bool, device=self._device)])
        self._in_output = torch.cat([self._in_output, torch.zeros(shape, dtype=torch.int32, device=self._device)])
        self._free.extend(range(old, old + extra))
