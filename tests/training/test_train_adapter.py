"""Training adapters on a tiny model: it learns, PEFT reads what is written, and it is served and merged alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.adapter_files import greedy
from helpers.drafter_files import layer_config
from peft import LoraConfig, PeftModel, get_peft_model
from training.test_train_drafter import Silent

from millrace.config import load_config
from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.models.weights.random_weights import RandomWeights
from millrace.training.lora.merge import merge
from millrace.training.lora.options import AdapterOptions
from millrace.training.lora.train import AdapterReport, train_adapter

VOCAB = 300
PROMPT = [*b"ask 3:"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config; `base` is the same model of transformers."""
    folder = tmp_path_factory.mktemp("model")
    config = layer_config(VOCAB, architectures=["LlamaForCausalLM"], num_hidden_layers=3, initializer_range=0.3)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}), encoding="utf-8")
    rows = [{"prompt": f"ask {index}:", "completion": f"yes {index}"} for index in range(40)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def base(model: Path) -> Any:
    config = json.loads((model / "config.json").read_text())
    values = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    found = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).float().eval()
    weights = RandomWeights(model / "config.json", config, seed=0)
    found.load_state_dict({name: weights.get(name) for name in weights.names()}, strict=False)
    return found


def train(model: Path, output: Path, report: Silent | None = None, **changes: Any) -> AdapterReport:
    values = {"model.source": f"random:{model}", "run.device": "cpu"}
    fields = {"rank": 4, "epochs": 30.0, "batch_tokens": 256, "learning_rate": 1e-2, "save_every": 1000, **changes}
    options = AdapterOptions(output=output, data=model / "data.jsonl", **fields)
    return train_adapter(options, load_config(None, values).config, "millrace train-adapter", report or Silent())


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AdapterReport]:
    folder = tmp_path_factory.mktemp("trained") / "out"
    return folder, train(model, folder, targets=("q_proj", "v_proj", "down_proj"), uses_rslora=True)


@pytest.mark.live  # A process reads its adapter.
def test_it_learns_and_peft_and_the_server_read_it_alike(model: Path, trained: tuple[Path, AdapterReport]) -> None:
    folder, report = trained
    assert report.loss_after < 0.5 * report.loss_before
    assert (folder / "curves.svg").read_text(encoding="utf-8").startswith("<svg xmlns")
    assert report.text() in (folder / "README.md").read_text(encoding="utf-8")
    wanted = greedy(PeftModel.from_pretrained(base(model), folder), PROMPT, 12)
    assert wanted != greedy(base(model), PROMPT, 12)
    with LLM(f"random:{model}", dtype="float32", kv_tokens=512, adapters={"own": folder}) as llm:
        params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        assert llm.generate([PROMPT], adapter="own", **params)[0].token_ids == wanted
        assert llm.generate([PROMPT], **params)[0].token_ids == greedy(base(model), PROMPT, 12)


def test_merged_weights_are_pefts(model: Path, trained: tuple[Path, AdapterReport], tmp_path: Path) -> None:
    saved = base(model)
    saved.save_pretrained(tmp_path / "base")
    merge(str(tmp_path / "base"), trained[0], tmp_path / "merged", Silent())
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    wanted = PeftModel.from_pretrained(base(model), trained[0]).merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="is not empty"):
        merge(str(tmp_path / "base"), trained[0], tmp_path / "merged", Silent())
    with pytest.raises(ConfigError, match="is random; an adapter is merged into the unquantised checkpoint"):
        merge(f"random:{model}", trained[0], tmp_path / "other", Silent())


@pytest.mark.parametrize("use_rslora", [False, True])
def test_dora_is_merged_as_peft_merges_it(use_rslora: bool, model: Path, tmp_path: Path) -> None:
    saved = base(model)
    saved.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, use_dora=True, use_rslora=use_rslora)
    tuned = get_peft_model(base(model), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_" in name:
                weight.copy_(weight + 0.2 * torch.randn_like(weight))
    tuned.save_pretrained(tmp_path / "dora")
    merge(str(tmp_path / "base"), tmp_path / "dora", tmp_path / "merged", Silent())
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    wanted = tuned.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_resumed_training_ends_with_the_same_adapter(model: Path, tmp_path: Path) -> None:
    own = {"epochs": 3.0, "save_every": 2, "dropout": 0.0}
    train(model, tmp_path / "whole", **own)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "parts", Silent(stop_at=4), **own)
    with pytest.raises(ConfigError, match="--resume"):
        train(model, tmp_path / "parts", **own)
    train(model, tmp_path / "parts", resume=True, **own)
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


def test_weights_that_are_read_each_time_give_the_same_adapter(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model, tmp_path / "kept", epochs=1.0)
    monkeypatch.setattr("millrace.training.lora.train.keeps_weights", lambda files, spec: False)
    train(model, tmp_path / "read", epochs=1.0)
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("kept", "read")]
    assert files[0] == files[1]


def test_examples_that_cannot_be_learned_are_refused(model: Path, tmp_path: Path) -> None:
    for line, says in (
        ('{"prompt": "a"}', "line 1 is no example"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}]}',
            "must be the assistant's",
        ),
        ("nothing", "is no JSON"),
        ('{"text": "one"}', "give two or more"),
    ):
        (tmp_path / "data.jsonl").write_text(line)
        (tmp_path / "config.json").write_text((model / "config.json").read_text())
        with pytest.raises(ConfigError, match=says):
            train(tmp_path, tmp_path / "out")
