"""Model sources resolve to local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_files import write_gguf
from safetensors.numpy import save_file

from millrace.errors import ModelError
from millrace.sources import resolve
from millrace.sources.known_models import KnownModel
from millrace.sources.resolve import resolve_model

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
GGUF_METADATA = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def make_gguf(path: Path, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    embedding = np.zeros((10, 8), dtype=np.float32)
    return write_gguf(path, {**GGUF_METADATA, **more}, {"token_embd.weight": embedding})


def make_directory(folder: Path, config: dict[str, Any] | None = CONFIG, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"model.norm.weight": np.ones(8, dtype=np.float32)}, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- known names ---


@pytest.fixture
def known_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces downloads of known models by a tiny file. The list records the requested names."""
    asked: list[str] = []

    def fetch(model: KnownModel, *, progress: Any = None) -> Path:
        asked.append(model.name)
        return make_gguf(tmp_path / "cache" / model.file_name)

    monkeypatch.setattr(resolve, "fetch_known", fetch)
    return asked


def test_a_known_name_is_fetched_and_keeps_its_name(known_file: list[str]) -> None:
    files = resolve_model("SmolLM2")
    assert (files.name, files.kind) == ("smollm2-135m-instruct", "gguf")
    assert files.weights == (files.path,)
    assert files.config["hidden_size"] == 8
    assert known_file == ["smollm2-135m-instruct"]


def test_misspelt_names_get_a_suggestion_and_the_list() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2-135m-instruct'\?.*millrace models.*org/model@"):
        resolve_model("smollm2-135-instruct")
    for text in ("zzz", "", "two words", "a/b/c"):
        with pytest.raises(ModelError, match="There is no model"):
            resolve_model(text)


# --- local paths ---


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    files = resolve_model(str(make_gguf(tmp_path / "my-model.Q4_0.gguf")))
    assert (files.name, files.kind, files.config["model_type"]) == ("my-model.Q4_0", "gguf", "llama")


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_gguf(tmp_path / "m.gguf")
    assert resolve_model("~/m.gguf").path == tmp_path / "m.gguf"


def test_a_directory_with_safetensors(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "my-model")
    files = resolve_model(str(folder))
    assert (files.name, files.kind, files.path) == ("my-model", "safetensors", folder)
    assert files.config == CONFIG
    assert files.weights == (folder / "model.safetensors",)
    other = make_directory(tmp_path / "other", name="weights.safetensors")
    assert resolve_model(str(other)).weights == (other / "weights.safetensors",)


def test_a_directory_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m" / "a.gguf")
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "m" / "mmproj-a.gguf").write_bytes(b"a vision projector")
    files = resolve_model(str(tmp_path / "m"))
    assert (files.name, files.kind, files.path.name) == ("m", "gguf", "a.gguf")
    make_gguf(tmp_path / "m" / "b.gguf")
    with pytest.raises(ModelError, match=r"contains 2 GGUF models \(a.gguf, b.gguf\)"):
        resolve_model(str(tmp_path / "m"))


def test_a_split_gguf_counts_as_one_and_names_all_its_files(tmp_path: Path) -> None:
    first = make_gguf(tmp_path / "m" / "big-00001-of-00002.gguf", **{"split.count": 2})
    second = write_gguf(
        tmp_path / "m" / "big-00002-of-00002.gguf", {"split.count": 2}, {"output_norm.weight": np.ones(8, np.float32)}
    )
    assert resolve_model(str(tmp_path / "m")).weights == (first, second)
    assert resolve_model(str(first)).name == "big"


def test_shards_come_from_the_index_and_must_all_be_there(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "m", name="model-00001-of-00002.safetensors")
    save_file({"lm_head.weight": np.ones(8, dtype=np.float32)}, folder / "model-00002-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    with pytest.raises(ModelError, match=r"several safetensors.*no model.safetensors.index.json"):
        resolve_model(str(folder))
    names = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    index.write_text(json.dumps({"weight_map": names}))
    assert [path.name for path in resolve_model(str(folder)).weights] == sorted(names.values())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no file model-00002-of-00002.safetensors"):
        resolve_model(str(folder))
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="outside its directory"):
        resolve_model(str(folder))
    for broken in ("{}", '{"weight_map": {}}', '{"weight_map": [1]}', "not json"):
        index.write_text(broken)
        with pytest.raises(ModelError, match=r"index.json"):
            resolve_model(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / name).write_bytes(b"\x80\x04")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"pickled.*refused.*Convert"):
        resolve_model(str(folder))
    with pytest.raises(ModelError, match=r"pickled.*refused.*Convert"):
        resolve_model(str(folder / name))


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    folder = make_directory(tmp_path / "m", config=None)
    cases = {
        "empty": r"has no \.safetensors, \.gguf or \.onnx files",
        "notes.txt": "neither a .gguf or .onnx file nor a model directory",
        "absent.gguf": "no file or directory",
        "m": r"There is no config.json in",
        "m/model.safetensors": "give its directory",
    }
    for name, message in cases.items():
        with pytest.raises(ModelError, match=message):
            resolve_model(str(tmp_path / name))
    for broken in ("", "[1, 2]", "{", '"text"', '{"hidden_size": 8}', "[" * 100_000):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ModelError, match=r"config.json"):
            resolve_model(str(folder))
    (folder / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match=r"config.json"):
        resolve_model(str(folder))


def test_checkpoints_quantised_by_an_unknown_method_are_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "quip"}}
    with pytest.raises(ModelError, match=r"'quip'.*gptq.*GGUF"):
        resolve_model(str(make_directory(tmp_path / "m", config)))
    known = {**CONFIG, "compression_config": {"quant_method": "compressed-tensors"}}
    found = resolve_model(str(make_directory(tmp_path / "known", known))).config
    assert found["quantization_config"] == {"quant_method": "compressed-tensors"}


def test_nested_text_config_moves_to_the_top_level(tmp_path: Path) -> None:
    nested = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {"hidden_size": 16, "model_type": "gemma3_text", "eos_token_id": None},
        "vision_config": {"hidden_size": 999},
    }
    config = resolve_model(str(make_directory(tmp_path / "m", nested))).config
    assert config == {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "hidden_size": 16,
        "eos_token_id": [1, 106],
    }


# --- random weights ---


def test_random_takes_a_config_file_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    files = resolve_model(f"random:{tmp_path / 'tiny.json'}")
    assert (files.name, files.kind, files.weights, files.config) == ("random-tiny", "random", (), CONFIG)
    folder = make_directory(tmp_path / "shape")
    assert resolve_model(f"random:{folder}").name == "random-shape"
    assert resolve_model(f"random:{folder / 'config.json'}").name == "random-shape"
    with pytest.raises(ModelError, match="no config file"):
        resolve_model(f"random:{tmp_path / 'absent.json'}")
