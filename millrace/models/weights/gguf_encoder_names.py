"""Maps an encoder's Hugging Face tensor names to pieces of GGUF tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from millrace.errors import ModelError
from millrace.models.weights.gguf_piece import GgufPiece, whole_piece
from millrace.sources.gguf.model import GgufModel

_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_0-9]+)\.(weight|bias)")
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
_BERT_LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_JINA_LAYER = _BERT_LAYER | {
    "ffn_gate": "mlp.gate_layer",
    "ffn_up": "mlp.up_layer",
    "ffn_down": "mlp.wo",
    "layer_output_norm": "mlp.layernorm",
}
_NOMIC = _BERT | {"token_embd_norm": "emb_ln"}
_NOMIC_LAYER = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_gate": "mlp.fc12",
    "ffn_up": "mlp.fc11",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}


def encoder_pieces(model: GgufModel, config: dict[str, Any]) -> dict[str, GgufPiece]:
    """Every Hugging Face tensor in the file. A tensor that the family does not have is an error."""
    is_nomic = config["model_type"] == "nomic_bert"
    own, layers = (_NOMIC, "encoder.layers") if is_nomic else (_BERT, "encoder.layer")
    parts = _NOMIC_LAYER if is_nomic else _JINA_LAYER if "feed_forward_type" in config else _BERT_LAYER
    found: dict[str, GgufPiece] = {}
    for tensor in model.names():
        whole, match = whole_piece(model, tensor), _BLOCK.fullmatch(tensor)
        stem, _, kind = tensor.rpartition(".")
        if match is not None and match[2] == "attn_qkv" and not is_nomic:
            found |= dict(_thirds(whole, f"{layers}.{match[1]}", match[3]))
        elif match is not None and match[2] in parts:
            found[f"{layers}.{match[1]}.{parts[match[2]]}.{match[3]}"] = whole
        elif stem in own:
            found[f"{own[stem]}.{kind}"] = whole
        else:
            raise ModelError(
                f"{model.file_of(tensor).path}: tensor '{tensor}' does not belong to a {config['model_type']} encoder,"
                " so the vectors would be wrong. Use the safetensors files of this model."
            )
    return found


def _thirds(whole: GgufPiece, layer: str, kind: str) -> Iterator[tuple[str, GgufPiece]]:
    rows = whole.num_rows // 3
    for place, part in enumerate(("attn_q", "attn_k", "attn_v")):
        piece = replace(whole, shape=(rows, *whole.shape[1:]), first_row=place * rows, num_rows=rows)
        yield f"{layer}.{_BERT_LAYER[part]}.{kind}", piece
