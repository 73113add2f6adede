"""Small random encoders of every family, saved by `transformers`, with a tokenizer of words and sentence-transformers'
module files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = "the a sea sky is blue red fish swims in water dog cat runs far away what colour has two sun moon".split()
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz"]
VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "bert_tanh": ("Bert", {**_SIZES, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", {**_SIZES, "pad_token_id": 1, "max_position_embeddings": 66, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {**_SIZES, "pad_token_id": 1, "max_position_embeddings": 66, "type_vocab_size": 1}),
    "camembert": ("Camembert", {**_SIZES, "pad_token_id": 1, "max_position_embeddings": 66, "type_vocab_size": 1}),
    "electra": ("Electra", {**_SIZES, "embedding_size": 32}),
    "distilbert": (
        "DistilBert",
        {**_SIZES, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "mpnet": ("MPNet", {**_SIZES, "pad_token_id": 1, "max_position_embeddings": 66}),
    "modernbert": (
        "ModernBert",
        {**_SIZES, "local_attention": 8, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "nomic_bert": ("NomicBert", _SIZES),
    "gte": ("Gte", {**_SIZES, "type_vocab_size": 2}),
}


def make_model(case: str, suffix: str = "Model", **changes: Any) -> Any:
    """A `transformers` model with larger random weights than its own, so that differences show."""
    import transformers

    kind, values = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**values, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}{suffix}")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = weight.dim() == 1 and name.endswith("weight")
            weight.copy_((1.0 if is_scale else 0.0) + 0.2 * torch.randn_like(weight))
    return model.requires_grad_(False)


def save_encoder(folder: Path, case: str = "bert", suffix: str = "Model", **changes: Any) -> Path:
    """The model's directory, as a user would download it."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(case, suffix, **changes).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(TOKENS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None, **settings: Any) -> None:
    """sentence-transformers' module files. `kinds` follow the transformer: Pooling, Dense, Normalize."""
    names = ["Transformer", *kinds]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir(exist_ok=True)
    if "Pooling" in kinds:
        place = folder / f"{names.index('Pooling')}_Pooling" / "config.json"
        place.write_text(
            json.dumps({"word_embedding_dimension": 48, **(pooling or {"pooling_mode_mean_tokens": True})})
        )
    if settings:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def write_dense(folder: Path, in_features: int, out_features: int, activation: str = "Tanh") -> None:
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weights = {"linear.weight": torch.randn(out_features, in_features), "linear.bias": torch.randn(out_features)}
    save_file(weights, folder / "model.safetensors")
    described = {
        "in_features": in_features,
        "out_features": out_features,
        "bias": True,
        "activation_function": f"torch.nn.modules.activation.{activation}",
    }
    (folder / "config.json").write_text(json.dumps(described))
