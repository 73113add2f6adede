"""Translates GGUF metadata of encoders into the content of a `config.json`.

`pooling` is a key of our own: what sentence-transformers stores in module files, a GGUF file has in its metadata.
"""

from __future__ import annotations

from typing import Any

from millrace.sources.gguf.metadata import Metadata

_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
RANK = 4
"""Values of `pooling_type`; 0 is none."""


def bert(meta: Metadata) -> dict[str, Any]:
    """BERT, RoBERTa and XLM-RoBERTa: converters leave out the position rows that the last two do not use."""
    is_ranker = meta.whole("pooling_type", 0, minimum=0) == RANK
    if is_ranker and "cls.output.weight" not in meta.model:
        raise meta.fail("pooling_type", "asks for a score, but the file has no tensor cls.output.weight")
    config = _common(meta, "roberta" if is_ranker else "bert")
    labels = meta.get("classifier.output_labels") or ["relevance"]
    if is_ranker:
        config |= {"architectures": ["RobertaForSequenceClassification"]}
        config["id2label"] = {str(index): str(label) for index, label in enumerate(labels)}
    return config | {"hidden_act": "gelu", "position_offset": 0}


def nomic_bert(meta: Metadata) -> dict[str, Any]:
    return _common(meta, "nomic_bert") | {
        "rotary_emb_base": meta.number("rope.freq_base", 1000.0),
        "hidden_act": "silu",
    }


def jina_bert(meta: Metadata) -> dict[str, Any]:
    for part in ("attn_q_norm", "attn_norm_2"):
        if f"blk.0.{part}.weight" in meta.model:
            raise meta.fail("block_count", f"goes with norms ({part}) that only jina's models for code have")
    return _common(meta, "bert") | {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def _common(meta: Metadata, model_type: str) -> dict[str, Any]:
    types = meta.model.tensor("token_types.weight").shape[0] if "token_types.weight" in meta.model else 0
    return {
        "model_type": model_type,
        "architectures": ["BertModel"],
        "vocab_size": meta.model.tensor("token_embd.weight").shape[0],
        "hidden_size": meta.whole("embedding_length"),
        "num_hidden_layers": meta.whole("block_count"),
        "num_attention_heads": meta.whole("attention.head_count"),
        "intermediate_size": meta.whole("feed_forward_length"),
        "max_position_embeddings": meta.whole("context_length"),
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon"),
        "type_vocab_size": types,
        "pooling": _POOLING.get(meta.whole("pooling_type", 0, minimum=0)),
    }
