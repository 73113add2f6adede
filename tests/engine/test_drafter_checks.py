"""Which drafters an engine takes: checked before anything is allocated, refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.drafter_files import HIDDEN, layer_config, layer_tensors, write
from helpers.tiny_models import VOCAB, config_of, make_reference

from millrace.config import Config, PlanConfig
from millrace.engine.decisions.settings import draft_settings
from millrace.engine.drafting.find import DraftModelSource, find_drafter
from millrace.errors import ConfigError
from millrace.models.spec.families import spec_from_config
from millrace.run.device.defaults import CPU_DEFAULTS, CUDA_DEFAULTS
from millrace.sources.resolve import ModelFiles, resolve_model


def model_in(folder: Path, case: str = "llama", **changes: Any) -> ModelFiles:
    """A model with random weights and a tokenizer of bytes and numbers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(make_reference(case)) | changes), encoding="utf-8")
    return resolve_model(f"random:{folder}")


def find(target: ModelFiles, **settings: Any) -> Any:
    config = dataclasses.replace(Config(), plan=dataclasses.replace(PlanConfig(), **settings))
    return find_drafter(config, target, spec_from_config(target.config), "none")


def test_a_draft_model_with_a_padded_vocabulary_fits(tmp_path: Path) -> None:
    target = model_in(tmp_path / "target")
    model_in(tmp_path / "draft", num_hidden_layers=1)
    found = find(target, speculate="draft", drafter=f"random:{tmp_path / 'draft'}")
    assert isinstance(found, DraftModelSource)
    assert found.spec.num_layers == 1
    assert not found.spec.has_kv_groups


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculate": "draft"}, "needs a smaller model with the same tokens. Set --drafter"),
        ({"speculate": "ngram", "drafter": "x"}, "plan.speculate is ngram, which drafts without a model"),
        ({"speculate": "off", "drafter": "x"}, "plan.speculate is off"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        find(model_in(tmp_path / "target"), **settings)


def test_other_tokens_are_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    target = model_in(tmp_path / "target")
    model_in(tmp_path / "draft", vocab_size=VOCAB + 300)
    with pytest.raises(ConfigError, match=f"token {VOCAB} is missing in random-target and .* in random:"):
        find(target, speculate="draft", drafter=f"random:{tmp_path / 'draft'}")


def test_a_target_whose_layers_all_have_a_window_is_refused(tmp_path: Path) -> None:
    target = model_in(tmp_path / "target", "mistral_window")
    with pytest.raises(ConfigError, match="every layer of .* has a window"):
        find(target, speculate="draft", drafter=f"random:{tmp_path / 'target'}")


def test_auto_reads_from_the_files_what_a_drafter_is(tmp_path: Path) -> None:
    target = model_in(tmp_path / "target")
    assert find(target, speculate="auto") is None
    model_in(tmp_path / "draft", num_hidden_layers=1)
    found = find(target, speculate="auto", drafter=f"random:{tmp_path / 'draft'}")
    assert (found.kind, found.spec.num_layers) == ("draft", 1)
    hidden, size = spec_from_config(target.config).hidden_size, VOCAB
    heads = {f"{head}.0.linear.weight": torch.zeros(hidden, hidden) for head in range(2)}
    medusa = write(tmp_path / "medusa", {"medusa_num_heads": 2}, heads)
    assert find(target, speculate="auto", drafter=str(medusa)).kind == "medusa"
    tensors = {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), **layer_tensors("layers.0.", input_norm=False)}
    eagle = write(tmp_path / "eagle", layer_config(size), tensors)
    assert find(target, speculate="auto", drafter=str(eagle)).kind == "eagle"
    with pytest.raises(ConfigError, match="plan.speculate is medusa, but .* the format EAGLE. Set --speculate eagle"):
        find(target, speculate="medusa", drafter=str(eagle))


def test_what_a_drafter_reads_of_the_target_is_part_of_its_memory(tmp_path: Path) -> None:
    target = model_in(tmp_path / "target")
    tensors = {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm.weight": torch.zeros(HIDDEN)}
    tensors |= {"norm.weight": torch.zeros(HIDDEN), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    tensors |= layer_tensors("midlayer.", 2 * HIDDEN)
    config = layer_config(VOCAB, draft_vocab_size=VOCAB, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    eagle3 = find(target, speculate="eagle", drafter=str(write(tmp_path / "eagle3", config, tensors)))
    memory = eagle3.memory(torch.float32, "full", torch.device("cpu"))
    assert (memory.tap_width, memory.kept_width) == (3 * HIDDEN, HIDDEN)
    heads = {f"{head}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(2)}
    medusa = find(target, speculate="medusa", drafter=str(write(tmp_path / "m", {"medusa_num_heads": 2}, heads)))
    memory = medusa.memory(torch.float32, "full", torch.device("cpu"))
    assert (memory.weights_bytes, memory.tap_width, memory.kept_width) == (2 * HIDDEN * HIDDEN * 4, 0, HIDDEN)


def test_a_whole_model_is_no_heads(tmp_path: Path) -> None:
    target = model_in(tmp_path / "target")
    with pytest.raises(ConfigError, match="is a whole model, but --speculate eagle needs heads .* --speculate draft"):
        find(target, speculate="eagle", drafter=f"random:{tmp_path / 'target'}")


def test_only_a_cpu_with_auto_chooses_between_text_and_a_drafter() -> None:
    def chooses(speculate: str, *, is_gpu: bool, has_drafter: bool) -> bool:
        config = dataclasses.replace(Config(), plan=dataclasses.replace(PlanConfig(), speculate=speculate))
        drafter: Any = SimpleNamespace(max_drafts=None) if has_drafter else None
        return draft_settings(config, 64, CUDA_DEFAULTS if is_gpu else CPU_DEFAULTS, drafter).has_trained

    assert chooses("auto", is_gpu=False, has_drafter=True)
    assert not chooses("auto", is_gpu=True, has_drafter=True)
    assert not chooses("auto", is_gpu=False, has_drafter=False)
    assert not chooses("eagle", is_gpu=False, has_drafter=True)


def test_a_gpu_verifies_fewer_drafts_than_a_cpu() -> None:
    def most(*, is_gpu: bool, **settings: Any) -> int:
        config = dataclasses.replace(Config(), plan=dataclasses.replace(PlanConfig(), speculate="auto", **settings))
        return draft_settings(config, 64, CUDA_DEFAULTS if is_gpu else CPU_DEFAULTS).max_drafts

    assert (most(is_gpu=False), most(is_gpu=True)) == (15, 7)
    assert most(is_gpu=True, max_drafts=3) == most(is_gpu=True, draft_tokens=3) == 3
    with pytest.raises(ConfigError, match="draft-tokens is 8; this device verifies at most 7"):
        most(is_gpu=True, draft_tokens=8)


def test_a_row_has_at_most_as_many_places_as_a_drafter_has_heads() -> None:
    heads: Any = SimpleNamespace(max_drafts=3)

    def most(speculate: str, *, is_gpu: bool, **settings: Any) -> int:
        config = dataclasses.replace(Config(), plan=dataclasses.replace(PlanConfig(), speculate=speculate, **settings))
        return draft_settings(config, 64, CUDA_DEFAULTS if is_gpu else CPU_DEFAULTS, heads).max_drafts

    assert most("medusa", is_gpu=True) == most("auto", is_gpu=True) == 3
    assert most("medusa", is_gpu=True, max_drafts=2) == 2
    assert most("auto", is_gpu=False) == 15, "text may fill the others"
    assert most("auto", is_gpu=False, draft_tokens=5) == 5
    for speculate, is_gpu in (("medusa", True), ("medusa", False), ("auto", True)):
        with pytest.raises(ConfigError, match="the drafter has 3 heads, one for each draft. Set --draft-tokens 3"):
            most(speculate, is_gpu=is_gpu, draft_tokens=5)
