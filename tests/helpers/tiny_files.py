"""Tiny checkpoints on disk, with a tokenizer that has an ASCII character for each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


def write_tiny(folder: Path, case: str) -> Any:
    """Returns the `transformers` model."""
    model = make_reference(case, max_position_embeddings=512, eos_token_id=VOCAB - 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(model), default=str))
    tensors = StateDictSource.of(model).tensors
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    tokenizer = Tokenizer(BPE({chr(0x21 + index): index for index in range(94)} | {"Ġ": 94, "Ċ": 95}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
