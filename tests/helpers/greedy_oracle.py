"""Hugging Face `transformers` as the reference for greedy output, in float32.

Instead of generating, it scores prompt + output in one pass and demands that every output token is its argmax. By
induction that is token-for-token equality with its own greedy generation, at a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from helpers.transformers_oracle import load_model


class GreedyOracle:
    def __init__(self, gguf: Path) -> None:
        self.model = load_model(gguf)

    def first_difference(self, prompt: Sequence[int], output: Sequence[int]) -> str | None:
        """None if every token is the oracle's choice, else a message about the first that is not."""
        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = self.model(ids, logits_to_keep=len(output) + 1).logits[0, :-1]
        for index, (token, scores) in enumerate(zip(output, logits, strict=True)):
            best = int(scores.argmax())
            if best != token:
                gap = float(scores[best] - scores[token])
                return f"output token {index} is {token}, the oracle's is {best}, ahead by {gap:.2e}"
        return None
