"""Encoders with random weights in the shape of well-known ones, as files that every engine reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from millrace.errors import ConfigError

SHAPES = {"minilm": (6, 384, 12, 1536), "bge-base": (12, 768, 12, 3072), "bge-large": (24, 1024, 16, 4096)}
"""By name: layers, hidden size, heads, intermediate size. All are BERT, with mean pooling here."""
VOCAB_SIZE, MAX_TOKENS = 30522, 512
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_shape(name: str, folder: Path, words: tuple[str, ...]) -> None:
    """`words` are single tokens of the vocabulary."""
    if name not in SHAPES:
        raise ConfigError(f"--models is {name!r}; shapes of encoders are {', '.join(SHAPES)}.", param="models")
    num_layers, hidden, num_heads, wide = SHAPES[name]
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": wide,
        "hidden_act": "gelu",
        "max_position_embeddings": MAX_TOKENS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(num_layers, hidden, wide), folder / "model.safetensors", {"format": "pt"})
    _write_tokenizer(folder, words)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}))


def _weights(num_layers: int, hidden: int, wide: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, generator=generator)

    found = {
        "embeddings.word_embeddings.weight": random(VOCAB_SIZE, hidden),
        "embeddings.position_embeddings.weight": random(MAX_TOKENS, hidden),
        "embeddings.token_type_embeddings.weight": random(2, hidden),
        "pooler.dense.weight": random(hidden, hidden),
        "pooler.dense.bias": torch.zeros(hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(num_layers):
        own = f"encoder.layer.{layer}"
        linears = {f"attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
        linears |= {"attention.output.dense": (hidden, hidden)}
        linears |= {"intermediate.dense": (wide, hidden), "output.dense": (hidden, wide)}
        for name, shape in linears.items():
            found[f"{own}.{name}.weight"], found[f"{own}.{name}.bias"] = random(*shape), torch.zeros(shape[0])
        norms += [f"{own}.attention.output.LayerNorm", f"{own}.output.LayerNorm"]
    for name in norms:
        found[f"{name}.weight"], found[f"{name}.bias"] = torch.ones(hidden), torch.zeros(hidden)
    return found


def _write_tokenizer(folder: Path, words: tuple[str, ...]) -> None:
    tokens = [*_SPECIAL, *dict.fromkeys(words)]
    tokens += [f"unused{index}" for index in range(len(tokens), VOCAB_SIZE)]
    model = models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_TOKENS, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
