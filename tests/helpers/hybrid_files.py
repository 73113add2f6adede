"""Tiny checkpoints of hybrid models on disk, with a tokenizer that has a character for each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE


def write_hybrid(folder: Path, case: str) -> Any:
    """Returns the `transformers` model."""
    model = make_reference(case, max_position_embeddings=512)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(model), default=str))
    tensors = StateDictSource.of(model).tensors
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    Tokenizer(BPE({chr(0x100 + index): index for index in range(VOCAB)}, [])).save(str(folder / "tokenizer.json"))
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
