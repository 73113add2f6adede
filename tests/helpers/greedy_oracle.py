"""Hugging Face `transformers` as the reference for greedy output, in float32.

Instead of generating, it scores prompt + output in one pass and demands that every output token is its argmax. By
induction that is token-for-token equality with its own greedy generation, at a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from helpers.transformers_oracle import load_model

Answer = tuple[Sequence[int], Sequence[int]]
PASS_TOKENS = 400


class GreedyOracle:
    def __init__(self, gguf: Path) -> None:
        self.model = load_model(gguf)

    def differences(self, answers: Sequence[Answer]) -> dict[int, str]:
        """By index in `answers` (prompt and output): about the first token of each that is not the oracle's choice.

        Several are scored in one pass, padded at their ends, which earlier positions do not attend to."""
        lines = [[*prompt, *output] for prompt, output in answers]
        found: dict[int, str] = {}
        few: list[int] = []
        for index in sorted(range(len(lines)), key=lambda index: len(lines[index])):
            if few and (len(few) + 1) * len(lines[index]) > PASS_TOKENS:
                found |= self._score(few, lines, answers)
                few = []
            few.append(index)
        return found | self._score(few, lines, answers)

    @torch.inference_mode()
    def _score(self, few: list[int], lines: list[list[int]], answers: Sequence[Answer]) -> dict[int, str]:
        longest = max(len(lines[index]) for index in few)
        padded = [lines[index] + [0] * (longest - len(lines[index])) for index in few]
        states = self.model.model(torch.tensor(padded)).last_hidden_state
        found = {}
        for index, of_line in zip(few, states, strict=True):
            end, output = len(lines[index]) - 1, answers[index][1]
            if text := _first_difference(output, self.model.lm_head(of_line[end - len(output) : end])):
                found[index] = text
        return found


def _first_difference(output: Sequence[int], logits: torch.Tensor) -> str | None:
    for index, (token, scores) in enumerate(zip(output, logits, strict=True)):
        best = int(scores.argmax())
        if best != token:
            gap = float(scores[best] - scores[token])
            return f"output token {index} is {token}, the oracle's is {best}, ahead by {gap:.2e}"
    return None
