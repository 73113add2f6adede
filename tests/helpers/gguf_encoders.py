"""Small random encoders as GGUF files, as a converter would write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from helpers.gguf_files import Array, write_gguf
from helpers.tiny_encoders import TOKENS, VOCAB, make_model

BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
SPLIT_LAYER = {
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}


def write_bert(path: Path, case: str = "bert", suffix: str = "Model", pooling: int = 1, **changes: Any) -> Path:
    """`pooling`: 1 mean, 2 the first token, 4 a score."""
    config_offset = 2 if case != "bert" else 0
    tensors: dict[str, Array] = {}
    for name, tensor in make_model(case, suffix, **changes).state_dict().items():
        name = re.sub(r"^(bert|roberta)\.", "", name)
        if name.startswith("pooler") or name.endswith("_ids"):
            continue
        array = tensor.float().numpy()
        stem, _, kind = name.rpartition(".")
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", stem)
        own = f"blk.{match[1]}.{LAYER[match[2]]}" if match else BERT[stem]
        tensors[f"{own}.{kind}"] = array[config_offset:] if own == "position_embd" else array
    return write_gguf(path, {**_metadata("bert", pooling), **word_piece()}, tensors, "bert")


def write_nomic(path: Path) -> Path:
    import numpy as np

    tensors: dict[str, Array] = {}
    parts: dict[str, list[Array]] = {}
    for name, tensor in make_model("nomic_bert").state_dict().items():
        array = tensor.float().numpy()
        stem, _, kind = name.rpartition(".")
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
        if match is None:
            if stem in BERT:
                tensors[f"{BERT[stem]}.{kind}"] = array
        elif match[2] in SPLIT_LAYER:
            tensors[f"blk.{match[1]}.{SPLIT_LAYER[match[2]]}.{kind}"] = array
        else:
            parts.setdefault(f"blk.{match[1]}.attn_qkv.{kind}", []).append(array)
    tensors |= {name: np.concatenate(three) for name, three in parts.items()}
    metadata = {**_metadata("nomic-bert", 1), "nomic-bert.rope.freq_base": 1000.0, **word_piece()}
    return write_gguf(path, metadata, tensors, "nomic-bert")


def word_piece() -> dict[str, Any]:
    """The vocabulary of `tiny_encoders.write_tokenizer`, with beginnings of words marked."""
    tokens = [f"▁{token}" if index > 4 else token for index, token in enumerate(TOKENS)]
    tokens += [f"▁unused{index}" for index in range(len(tokens), VOCAB)]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if index < 5 else 1 for index in range(len(tokens))],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def _metadata(arch: str, pooling: int) -> dict[str, Any]:
    return {
        f"{arch}.{key}": value
        for key, value in {
            "embedding_length": 48,
            "block_count": 3,
            "attention.head_count": 4,
            "feed_forward_length": 80,
            "context_length": 64,
            "attention.layer_norm_epsilon": 1e-12,
            "pooling_type": pooling,
        }.items()
    }
