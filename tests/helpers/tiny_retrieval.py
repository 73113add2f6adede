"""Small random sparse (SPLADE) and multi-vector (ColBERT) encoders with the files of those who save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_encoders import save_encoder, write_modules

WIDTH = 16
_ROOMS = {"SpladePooling": "sparse_encoder.models", "MultiVectorMask": "multi_vector_encoder.modules"}


def save_splade(folder: Path, case: str = "bert", suffix: str = "ForMaskedLM", **pooling: str) -> Path:
    save_encoder(folder, case, suffix)
    write_modules(folder, "SpladePooling", model_type="SparseEncoder")
    _name_modules(folder)
    chosen = {"pooling_strategy": "max", "activation_function": "relu", **pooling}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(chosen))
    settings = {"transformer_task": "fill-mask", "max_seq_length": 64}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


def save_colbert(folder: Path, case: str = "bert", *, is_pylate: bool = False, **settings: Any) -> Path:
    """As sentence-transformers saves it, or as PyLate does. `settings`: of queries and documents."""
    from safetensors.torch import save_file

    save_encoder(folder, case)
    kinds = ("Dense",) if is_pylate else ("Dense", "MultiVectorMask", "Normalize")
    saved = {"query_prefix": "q ", "document_prefix": "d ", "skiplist_words": ["a", ","], **settings}
    write_modules(
        folder, *kinds, **(saved if is_pylate else {}), model_type="ColBERT" if is_pylate else "MultiVectorEncoder"
    )
    _name_modules(folder)
    torch.manual_seed(2)
    save_file({"linear.weight": 0.3 * torch.randn(WIDTH, 48)}, folder / "1_Dense" / "model.safetensors")
    dense = {"in_features": 48, "out_features": WIDTH, "bias": False, "module_input_name": "token_embeddings"}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    if not is_pylate:
        mask = {"skiplist_words": ["a", ","], "skiplist_tasks": ["document"]}
        (folder / "2_MultiVectorMask" / "config.json").write_text(json.dumps(mask))
        (folder / "3_Normalize" / "config.json").write_text(json.dumps({"module_input_name": "token_embeddings"}))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, **settings}))
    return folder


def save_stanford(folder: Path) -> Path:
    """As Stanford's ColBERT saves it: the projection beside the weights, settings in artifact.metadata."""
    from safetensors.torch import load_file, save_file

    save_encoder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(2)
    save_file({**tensors, "linear.weight": 0.3 * torch.randn(WIDTH, 48)}, folder / "model.safetensors")
    metadata = {"query_token_id": "q", "doc_token_id": "d", "query_maxlen": 12, "doc_maxlen": 20}
    (folder / "artifact.metadata").write_text(json.dumps({**metadata, "attend_to_mask_tokens": True}))
    return folder


def _name_modules(folder: Path) -> None:
    """The classes where sentence-transformers has them."""
    text = (folder / "modules.json").read_text()
    for kind, room in _ROOMS.items():
        text = text.replace(f"models.{kind}", f"{room}.{kind}")
    (folder / "modules.json").write_text(text)
