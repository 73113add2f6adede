"""Encoders give what `transformers` gives: every family on random weights, packed, each kind of head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_encoders import CASES, make_model, save_encoder, write_dense, write_modules
from torch import Tensor

from millrace.errors import ModelError
from millrace.models.encoders.encoder import pack
from millrace.models.encoders.load import LoadedEncoder, load_encoder
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")
TEXTS = [
    [2, 5, 6, 7, 3],
    [2, 9, 3],
    [2, *range(10, 60), 3],
    [2, 11, 12, 13, 3],
    [2, 40, 3],
]


def load(folder: Path) -> LoadedEncoder:
    return load_encoder(resolve_model(str(folder)), device=CPU, dtype=torch.float32)


def run(loaded: LoadedEncoder, texts: list[list[int]], second_from: list[int] | None = None) -> list[Tensor]:
    """The head's result of each text, in the order given."""
    packed, order = pack(texts, second_from or [0] * len(texts), [0] * len(texts))
    results = loaded.head(loaded.encoder(packed), packed)
    by_text = dict(zip(order, results, strict=True))
    return [by_text[index] for index in range(len(texts))]


def reference_states(model: Any, token_ids: list[int]) -> Tensor:
    states: Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [pytest.param(4, id="heads of 12 numbers"), pytest.param(3, id="heads of 16")])
def test_states_are_those_of_transformers(case: str, heads: int, tmp_path: Path) -> None:
    """C++ attends where a head is a multiple of 16 wide."""
    change = {"n_heads" if case == "distilbert" else "num_attention_heads": heads}
    loaded, model = load(save_encoder(tmp_path / "m", case, **change)), make_model(case, **change)
    packed, order = pack(TEXTS, [0] * len(TEXTS), [0] * len(TEXTS))
    states = loaded.encoder(packed).split(packed.lengths)
    for index, own in zip(order, states, strict=True):
        torch.testing.assert_close(own, reference_states(model, TEXTS[index]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
def test_logits_are_those_of_transformers(case: str, kind: str, tmp_path: Path) -> None:
    loaded, model = load(save_encoder(tmp_path / "m", case, kind, num_labels=3)), make_model(case, kind, num_labels=3)
    for text, logits in zip(TEXTS, run(loaded, TEXTS), strict=True):
        expected = model(torch.tensor([text])).logits[0]
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_modernbert_classifies_the_mean_if_its_config_says_so(tmp_path: Path) -> None:
    change = {"num_labels": 3, "classifier_pooling": "mean"}
    kind = "ForSequenceClassification"
    loaded, model = (
        load(save_encoder(tmp_path / "m", "modernbert", kind, **change)),
        make_model("modernbert", kind, **change),
    )
    for text, logits in zip(TEXTS, run(loaded, TEXTS), strict=True):
        torch.testing.assert_close(logits, model(torch.tensor([text])).logits[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["bert", "gte", "nomic_bert", "xlm-roberta"])
def test_the_second_text_of_a_pair_has_its_own_type(case: str, tmp_path: Path) -> None:
    kind = "ForSequenceClassification"
    loaded, model = load(save_encoder(tmp_path / "m", case, kind, num_labels=1)), make_model(case, kind, num_labels=1)
    pair = [2, 5, 6, 3, 7, 8, 9, 3]
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    given = {} if case == "xlm-roberta" else {"token_type_ids": types}
    expected = model(torch.tensor([pair]), **given).logits[0]
    together = run(loaded, [pair, [2, 9, 3]], [4, 0])
    torch.testing.assert_close(together[0], expected, atol=2e-5, rtol=1e-4)
    if case != "xlm-roberta":
        assert not torch.allclose(run(loaded, [pair])[0], expected, atol=1e-3)


def test_names_of_old_checkpoints_are_understood(tmp_path: Path) -> None:
    """Checkpoints converted from TensorFlow call a norm's parts gamma and beta."""
    from safetensors.torch import load_file, save_file

    folder = save_encoder(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert set(renamed) != set(tensors)
    save_file({f"bert.{name}": tensor for name, tensor in renamed.items()}, folder / "model.safetensors")
    packed, _ = pack(TEXTS[:1], [0], [0])
    torch.testing.assert_close(
        load(folder).encoder(packed), reference_states(make_model("bert"), TEXTS[0]), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_pooling_is_what_the_module_file_says(mode: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    write_modules(folder, "Pooling", pooling={"pooling_mode": mode})
    for text, vector in zip(TEXTS, run(load(folder), TEXTS), strict=True):
        states = reference_states(make_model("bert"), text)
        weights = torch.arange(1.0, len(text) + 1)
        expected = {
            "cls": states[0],
            "mean": states.mean(0),
            "max": states.max(0).values,
            "mean_sqrt_len_tokens": states.sum(0) / len(text) ** 0.5,
            "weightedmean": (states * weights[:, None]).sum(0) / weights.sum(),
            "lasttoken": states[-1],
        }[mode]
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)


def test_dense_and_normalise_follow_pooling(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    write_modules(folder, "Pooling", "Dense", "Normalize", pooling={"pooling_mode": ["cls", "mean"]})
    write_dense(folder / "2_Dense", 96, 20)
    from safetensors.torch import load_file

    weights = load_file(folder / "2_Dense" / "model.safetensors")
    states = reference_states(make_model("bert"), TEXTS[0])
    joined = torch.cat((states[0], states.mean(0)))
    expected = torch.tanh(weights["linear.weight"] @ joined + weights["linear.bias"])
    loaded = load(folder)
    assert loaded.head.width == 20
    torch.testing.assert_close(run(loaded, TEXTS)[0], expected / expected.norm(), atol=1e-4, rtol=1e-4)


def test_tokens_of_a_prompt_can_be_left_out_of_pooling(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    write_modules(folder, "Pooling", pooling={"pooling_mode_mean_tokens": True, "include_prompt": False})
    loaded = load(folder)
    packed, _ = pack([TEXTS[0]], [0], [3])
    expected = reference_states(make_model("bert"), TEXTS[0])[3:].mean(0)
    torch.testing.assert_close(loaded.head(loaded.encoder(packed), packed)[0], expected, atol=1e-4, rtol=1e-4)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 81}))
    with pytest.raises(ModelError, match=r"\(80,\).*\(81,\)"):
        load(folder)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rotary"),
        ("bert", {"hidden_act": "mish"}, "mish"),
    ],
)
def test_what_is_not_supported_is_refused(case: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", case)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_jina_v2_scores_fall_with_distance_and_its_mlp_is_gated(tmp_path: Path) -> None:
    """The published code is not part of transformers: this is BERT's own layer with what differs written out."""
    from safetensors.torch import load_file, save_file

    folder = save_encoder(tmp_path / "m", num_attention_heads=6)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    for layer in range(3):
        before = f"encoder.layer.{layer}"
        for part in ("weight", "bias"):
            tensors.pop(f"{before}.intermediate.dense.{part}")
            tensors[f"{before}.mlp.wo.{part}"] = tensors.pop(f"{before}.output.dense.{part}")
            tensors[f"{before}.mlp.layernorm.{part}"] = tensors.pop(f"{before}.output.LayerNorm.{part}")
        tensors[f"{before}.mlp.gated_layers.weight"] = 0.2 * torch.randn(160, 48)
    tensors.pop("embeddings.position_embeddings.weight")
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    (folder / "config.json").write_text(json.dumps(config))
    for text, vector in zip(TEXTS, run(load(folder), TEXTS), strict=True):
        expected = _jina_states(tensors, text).mean(0)
        torch.testing.assert_close(vector, expected / expected.norm(), atol=1e-5, rtol=1e-4)


def _jina_states(tensors: dict[str, Tensor], text: list[int]) -> Tensor:
    import torch.nn.functional as F

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (48,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    # Of six heads, four have the rates of four, and two the odd ones of eight.
    rates = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    at = torch.arange(len(text))
    bias = -rates[:, None, None] * (at[None, :] - at[:, None]).abs()
    x = tensors["embeddings.word_embeddings.weight"][text] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x)
    for layer in range(3):
        own = f"encoder.layer.{layer}"
        query, key, value = (
            linear(f"{own}.attention.self.{part}", x).view(-1, 6, 8).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        scores = query @ key.mT / 8**0.5 + bias
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(-1, 48)
        x = norm(f"{own}.attention.output.LayerNorm", x + linear(f"{own}.attention.output.dense", mixed))
        gate, up = linear(f"{own}.mlp.gated_layers", x).chunk(2, dim=-1)
        x = norm(f"{own}.mlp.layernorm", x + linear(f"{own}.mlp.wo", F.gelu(gate) * up))
    return x
