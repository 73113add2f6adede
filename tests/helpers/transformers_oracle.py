"""Run as a program: transformers' answers for a GGUF file, in its own process so that its memory is freed.

Reads a JSON request {path, num_tokens, prompts (token ids), texts} from the file named first and writes
{outputs (token ids), token_ids (of the texts)} to the file named second.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load_model(path: Path) -> Any:
    """Load the file with transformers' own GGUF reader, one copy in memory."""
    names = functools.cache(gguf.get_tensor_name_map)
    # The reader makes an array of every string: ten times faster from a plain array than from a memory map. The file is
    # read twice, and the table of names is made again for each module.
    with (
        patch.object(gguf.gguf_reader.np, "memmap", lambda file, dtype=np.uint8, mode="r": np.fromfile(file, dtype)),
        patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", names),
    ):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing = model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    assert not missing.unexpected_keys, missing
    model.tie_weights()
    # Computed buffers were created without memory; create them again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if hasattr(model.model.embed_tokens, "embed_scale"):
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    return list(made[0, len(prompt) :].tolist())


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    path = Path(request["path"])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    token_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in request["texts"]]
    model = load_model(path)
    outputs = [greedy(model, prompt, request["num_tokens"]) for prompt in request["prompts"]]
    Path(sys.argv[2]).write_text(json.dumps({"outputs": outputs, "token_ids": token_ids}))


if __name__ == "__main__":
    main()
