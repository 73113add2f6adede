"""Training on a tiny target: every kind learns, is written in a format that the loader reads, and can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.drafter_files import layer_config

from millrace.config import load_config
from millrace.errors import ConfigError, ModelError
from millrace.llm import LLM
from millrace.models.drafters.load import load_drafter, open_drafter
from millrace.models.drafters.program import EagleDrafter, MedusaDrafter
from millrace.models.load import load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.sources.resolve import resolve_model
from millrace.training.options import TrainedKind, TrainOptions
from millrace.training.report import TrainReport
from millrace.training.train import train_drafter

VOCAB = 300
SETTINGS = {"dtype": "float32", "device": "cpu", "max_context": 128, "kv_gib": 0.01}


class Silent:
    def __init__(self, stop_at: int = 0) -> None:
        self.texts: list[str] = []
        self._what, self._left = "", stop_at

    def stage(self, what: str, total: int) -> None:
        self._what = what

    def advance(self, count: int, note: str = "") -> None:
        if self._what == "training" and count == 1 and self._left:
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt

    def say(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    config = layer_config(VOCAB, architectures=["LlamaForCausalLM"], num_hidden_layers=3, initializer_range=0.3)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}), encoding="utf-8")
    return f"random:{folder}"


@pytest.fixture(scope="module")
def answered(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with prompts and answers, so that the engine starts once."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts-in.jsonl"
    rows = [{"text": f"{word} {index}", "workload": word} for word in ("chat", "code") for index in range(16)]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = TrainOptions(
        kind="medusa", output=folder / "out", data=prompts, max_tokens=24, epochs=0.1, answers_per_prompt=2
    )
    train(options, model)
    return folder / "out"


def train(options: TrainOptions, model: str, report: Silent | None = None) -> TrainReport:
    config = load_config(
        None,
        {
            "model.source": model,
            "model.dtype": "float32",
            "run.device": "cpu",
            "model.max_context": 128,
            "memory.kv_gib": 0.01,
        },
    ).config

    def open_llm() -> LLM:
        return LLM(model, **SETTINGS)

    return train_drafter(options, config, open_llm, "millrace train-drafter", report or Silent())


def copy_answers(answered: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("answers.jsonl", "prompts.jsonl"):
        (folder / name).write_text((answered / name).read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def options_for(kind: TrainedKind, folder: Path, **changes: object) -> TrainOptions:
    fields: dict[str, object] = {
        "draft_vocabulary": 0 if kind == "draft" else 200,
        "num_layers": 2,
        "depth": 3,
        "epochs": 10.0,
        "batch_tokens": 512,
        "learning_rate": 3e-3,
        "save_every": 1000,
    }
    return TrainOptions(kind=kind, output=folder, resume=True, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft"])
def test_every_kind_learns_and_is_written_as_the_loader_reads(
    kind: TrainedKind, model: str, answered: Path, tmp_path: Path
) -> None:
    folder = copy_answers(answered, tmp_path / kind)
    report = train(options_for(kind, folder), model)
    curves = report.curves
    assert min(curves.losses[-2:]) < 0.9 * curves.losses[0]
    assert set(report.acceptance) == {"chat", "code"}
    for own in report.acceptance.values():
        assert own.reached[0] >= own.accepted[0] >= own.accepted[1]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "chat" in card
    assert "tokens per step" in card
    assert (folder / "curves.svg").read_text(encoding="utf-8").startswith("<svg xmlns")

    files = resolve_model(model)
    found = open_drafter(folder, spec_from_config(files.config))
    assert found.spec.kind == kind
    if kind == "draft":
        assert found.spec.decoder is not None
        assert found.spec.decoder.num_layers == 2
        load_decoder(resolve_model(str(folder)), device=torch.device("cpu"), dtype=torch.float32)
        return
    assert found.spec.draft_vocab_size == 200
    target = load_decoder(files, device=torch.device("cpu"), dtype=torch.float32)
    drafter = load_drafter(found, target)
    assert isinstance(drafter, EagleDrafter if kind == "eagle" else MedusaDrafter)


def test_a_resumed_training_ends_with_the_same_weights(model: str, answered: Path, tmp_path: Path) -> None:
    whole = copy_answers(answered, tmp_path / "whole")
    parts = copy_answers(answered, tmp_path / "parts")
    train(options_for("medusa", whole, epochs=4.0, save_every=3), model)
    options = options_for("medusa", parts, epochs=4.0, save_every=3)
    with pytest.raises(KeyboardInterrupt):
        train(options, model, Silent(stop_at=5))
    assert (parts / "checkpoint.pt").is_file()
    assert not (parts / "model.safetensors").is_file()
    train(options, model)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_refusals(model: str, answered: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        train(TrainOptions(kind="eagle", output=answered), model)
    with pytest.raises(ConfigError, match="draft model has the target's whole vocabulary"):
        train(TrainOptions(kind="draft", output=tmp_path, draft_vocabulary=10, num_layers=1), model)
    with pytest.raises(ConfigError, match="300 tokens"):
        train(TrainOptions(kind="eagle", output=tmp_path, draft_vocabulary=300), model)
    with pytest.raises(ModelError, match="not smaller"):
        train(TrainOptions(kind="draft", output=tmp_path, num_layers=3), model)
    with pytest.raises(ConfigError, match="kind medusa"):
        train(options_for("eagle", answered), model)


@pytest.mark.live
def test_time_bounds_the_training(model: str, answered: Path, tmp_path: Path) -> None:
    folder = copy_answers(answered, tmp_path / "out")
    report = train(options_for("medusa", folder, epochs=1e5, minutes=0.005), model)
    assert 1 <= report.num_steps < 10_000
