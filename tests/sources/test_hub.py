"""Downloads from a stand-in of the hub: names, choice of files, resumption, digests, errors, use without network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from helpers.fake_hub import COMMIT, FakeHub, running_hub
from helpers.gguf_files import write_gguf
from huggingface_hub import constants
from safetensors.numpy import save

from millrace.errors import ModelError
from millrace.models.spec.families import FAMILIES
from millrace.sources import hub, library, names
from millrace.sources.adapters.find import adapter_folder
from millrace.sources.catalogue import UNSUPPORTED_FAMILIES, entries
from millrace.sources.drafters import drafter_folder
from millrace.sources.gguf.config import ARCHITECTURES
from millrace.sources.names import HubName, parse_name
from millrace.sources.resolve import resolve_model

pytestmark = pytest.mark.live

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
METADATA = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, METADATA, {"token_embd.weight": np.zeros((500, 8), np.float32)}).read_bytes()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_bytes: bytes) -> Iterator[FakeHub]:
    weights = save({"model.norm.weight": np.ones(2000, dtype=np.float32)})
    repos: dict[str, dict[str, bytes]] = {
        "org/model": {
            "config.json": json.dumps(CONFIG).encode(),
            "generation_config.json": b'{"temperature": 0.3}',
            "model.safetensors": weights,
            "tokenizer.json": b"{}",
            "README.md": b"read me",
            "pytorch_model.bin": b"pickle",
            "original/model.safetensors": b"other",
            "consolidated.safetensors": b"other",
        },
        "org/model-GGUF": {
            "model-Q4_K_M.gguf": gguf_bytes,
            "model-Q8_0.gguf": gguf_bytes,
            "mmproj-model-Q8_0.gguf": b"vision",
            "deep/model-F16.gguf": gguf_bytes,
        },
        "org/lora": {
            "adapter_config.json": b'{"peft_type": "LORA"}',
            "adapter_model.safetensors": weights,
            "optimizer.pt": b"pickle",
            "tokenizer.json": b"{}",
        },
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    with running_hub(FakeHub(repos)) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield running


def test_only_the_needed_files_are_downloaded_with_progress(fake: FakeHub) -> None:
    reports: list[tuple[str, int, int]] = []
    files = resolve_model("org/model", progress=lambda *report: reports.append(report))
    assert (files.name, files.kind) == ("org/model", "safetensors")
    assert set(fake.downloads) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    total = sum(len(fake.repos["org/model"][name]) for name in fake.downloads)
    assert {report[2] for report in reports} == {total}
    assert reports[-1][1] == total


def test_second_use_needs_no_hub(fake: FakeHub) -> None:
    resolve_model("org/model")
    fake.repos.clear()
    assert resolve_model("org/model", offline=True).name == "org/model"
    assert [model.name for model in library.list_downloaded()] == ["org/model"]


def test_an_adapter_is_its_config_and_its_matrices(fake: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    assert adapter_folder(str(tmp_path / "own"), max_bytes=0) == tmp_path / "own", "a directory is not asked for"
    with pytest.raises(ModelError, match=r"org/lora:adapter' has [\d,]+ bytes on the hub; at most 100 are downloaded"):
        adapter_folder("org/lora", max_bytes=100)
    with pytest.raises(ModelError, match="--offline"):
        adapter_folder("org/lora", max_bytes=10**6, offline=True)
    with pytest.raises(ModelError, match=r"hub name. .* has no adapter_config.json, adapter_model.safetensors"):
        adapter_folder("org/pickled", max_bytes=10**6)
    assert fake.downloads == []
    folder = adapter_folder("org/lora@v1", max_bytes=10**6)
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert [model.name for model in library.list_downloaded()] == ["org/lora@v1:adapter"]
    fake.repos.clear()
    assert adapter_folder("org/lora@v1", max_bytes=0, offline=True) == folder
    library.remove("org/lora@v1:adapter")
    assert library.list_downloaded() == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/model-GGUF:Q4_K_M", "model-Q4_K_M.gguf"),
        ("org/model-GGUF:q8_0", "model-Q8_0.gguf"),
        ("org/model-GGUF@v1:deep/model-F16.gguf", "model-F16.gguf"),
    ],
)
def test_a_quantisation_or_file_is_chosen(fake: FakeHub, name: str, file: str) -> None:
    files = resolve_model(name)
    assert (files.kind, files.path.name) == ("gguf", file)
    assert len(fake.downloads) == 1


def test_an_interrupted_transfer_is_resumed(fake: FakeHub, gguf_bytes: bytes) -> None:
    fake.cut_after = 1500
    path = resolve_model("org/model-GGUF:Q4_K_M").path
    assert path.read_bytes() == gguf_bytes
    assert fake.ranges == ["bytes=1500-"]


def test_damaged_files_are_deleted_and_reported(fake: FakeHub) -> None:
    fake.damage = True
    with pytest.raises(ModelError, match=r"model-Q4_K_M\.gguf of .* arrived damaged: its SHA-256 is .*run again"):
        resolve_model("org/model-GGUF:Q4_K_M")
    fake.damage = False
    assert resolve_model("org/model-GGUF:Q4_K_M").kind == "gguf"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/absent", "The hub has no such model, or it is private"),
        ("org/model@v9", "has no revision 'v9'"),
        ("org/model-GGUF", r"has GGUF files only\. Name one: org/model-GGUF:F16"),
        ("org/model-GGUF:Q3_K_S", r"no GGUF file for ':Q3_K_S'. It has F16, Q4_K_M, Q8_0"),
        ("org/pickled", "no safetensors or GGUF files. Pickled weights are refused"),
    ],
)
def test_errors_say_what_to_do(fake: FakeHub, name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        resolve_model(name)


def test_gated_models_ask_for_a_login(fake: FakeHub) -> None:
    fake.gated.add("org/model")
    with pytest.raises(ModelError, match=r"gated: accept its licence .* HF_TOKEN"):
        resolve_model("org/model")


def test_offline_names_the_option(fake: FakeHub) -> None:
    with pytest.raises(ModelError, match="not on this machine, and --offline forbids"):
        resolve_model("org/model", offline=True)
    assert fake.downloads == []


def test_unreachable_hub_is_reported(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("Name or service not known\nand a long trace")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(ModelError, match=r"ConnectionError: Name or service not known\) Check the network"):
        resolve_model("org/model")


def test_remove_frees_the_files(fake: FakeHub) -> None:
    path = resolve_model("org/model-GGUF:Q4_K_M").path
    other = resolve_model("org/model-GGUF:deep/model-F16.gguf").path  # The same content, so the same blob.
    assert library.remove("org/model-GGUF:Q4_K_M") == ("org/model-GGUF:Q4_K_M", 0)
    assert not path.exists()
    assert other.exists()
    _, freed = library.remove("org/model-GGUF:deep/model-F16.gguf")
    assert freed > 0
    assert hub.downloaded_models() == []
    with pytest.raises(ModelError, match=r"is not downloaded\. Downloaded: none"):
        library.remove("org/model-GGUF:Q4_K_M")


def test_remove_keeps_a_model_with_the_same_files_and_another_name(fake: FakeHub) -> None:
    resolve_model("org/model-GGUF:Q4_K_M")
    resolve_model("org/model-GGUF:q4_k_m")
    library.remove("org/model-GGUF:Q4_K_M")
    assert [model.name for model in hub.downloaded_models()] == ["org/model-GGUF:q4_k_m"]


def test_names_with_the_same_manifest_file_are_not_mixed_up(fake: FakeHub) -> None:
    resolve_model("org/model-GGUF:Q4_K_M")
    assert hub.find_downloaded(HubName("org/model-GGUF--Q4_K_M")) is None


def test_a_clients_name_is_never_a_path(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "secret").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="could not be downloaded"):
        resolve_model("org/secret", allow_paths=False)


def test_describe_gives_commit_and_sizes(fake: FakeHub) -> None:
    model = hub.describe(HubName("org/model-GGUF", variant="Q8_0"))
    assert model.commit == COMMIT
    assert model.num_bytes == len(fake.repos["org/model-GGUF"]["model-Q8_0.gguf"])


@pytest.mark.parametrize(
    ("text", "gpu", "expected"),
    [
        ("llama3.1", True, HubName("meta-llama/Llama-3.1-8B-Instruct")),
        ("Llama3.1:8b", True, HubName("meta-llama/Llama-3.1-8B-Instruct")),
        ("llama3.1-8b", False, HubName("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", variant="Q4_K_M")),
        ("qwen3:0.6b", False, HubName("Qwen/Qwen3-0.6B-GGUF", variant="Q4_K_M")),
        ("qwen3-0.6b:q8_0", True, HubName("Qwen/Qwen3-0.6B-GGUF", variant="q8_0")),
        ("qwen3:8b:fp8", False, HubName("Qwen/Qwen3-8B-FP8")),
        ("qwen3-8b:AWQ", True, HubName("Qwen/Qwen3-8B-AWQ")),
        ("qwen2.5-7b:gptq", False, HubName("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4")),
        ("Qwen/Qwen3-0.6B", False, HubName("Qwen/Qwen3-0.6B")),
        ("gpt-oss:20b", False, HubName("unsloth/gpt-oss-20b-GGUF", "main", "Q4_K_M")),
        ("a/b@refs/pr/1:Q4_0", True, HubName("a/b", "refs/pr/1", "Q4_0")),
        ("nothing-known", True, None),
    ],
)
def test_names(text: str, gpu: bool, expected: HubName | None) -> None:
    assert parse_name(text, has_gpu=gpu) == expected


def test_a_checkpoint_that_the_catalogue_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ModelError, match=r"no awq checkpoint of qwen3-0.6b.*qwen3-0.6b:fp8.*qwen3-0.6b:q4_k_m"):
        parse_name("qwen3-0.6b:awq", has_gpu=True)


def test_aliases(fake: FakeHub) -> None:
    names.write_alias("mine", "org/model-GGUF:Q4_K_M")
    assert resolve_model("mine").path.name == "model-Q4_K_M.gguf"
    assert names.read_aliases() == {"mine": "org/model-GGUF:Q4_K_M"}
    names.write_alias("mine", "")
    assert names.read_aliases() == {}
    for name, says in (("smollm2", "name of a known model"), ("no way", "cannot be an alias"), ("x", "no alias 'x'")):
        with pytest.raises(ModelError, match=says):
            names.write_alias(name, "" if name == "x" else "org/model")


def test_families_that_cannot_be_loaded_are_refused_before_a_download(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["millrace.sources.catalogue.entries"], "UNSUPPORTED_FAMILIES", frozenset({"phi3"}))
        refused_before_a_download()
    loadable = {kind for family in FAMILIES for kind in family.model_types}
    assert {entry.family for entry in entries()} - loadable == UNSUPPORTED_FAMILIES, "update UNSUPPORTED_FAMILIES"


def refused_before_a_download() -> None:
    for name in ("phi4", "microsoft/phi-4"):
        with pytest.raises(ModelError, match=r"not supported yet; nothing was downloaded"):
            resolve_model(name)


def test_gguf_files_of_every_family_of_the_catalogue_can_be_read() -> None:
    readable = {architecture.replace("-", "") for architecture in ARCHITECTURES} | {"gemma3text", "mistral", "mixtral"}
    families = {entry.family for entry in entries() if entry.is_supported}
    assert {name for name in families if name.replace("_", "") not in readable} == set()


# --- drafters ---


def test_a_drafter_is_a_directory_or_a_hub_name(fake: FakeHub, tmp_path: Path) -> None:
    assert drafter_folder(str(tmp_path)) == tmp_path
    folder = drafter_folder("org/model")
    assert folder is not None
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "pytorch_model.bin").exists(), "safetensors files are preferred"


def test_a_drafter_may_have_torch_files_and_is_found_again(fake: FakeHub) -> None:
    folder = drafter_folder("org/pickled")
    assert folder is not None
    assert (folder / "pytorch_model.bin").read_bytes() == b"pickle"
    fake.repos.clear()
    assert drafter_folder("org/pickled", offline=True) == folder
    with pytest.raises(ModelError, match="pickled weights, which are refused"):
        resolve_model("org/pickled", offline=True)


@pytest.mark.parametrize("name", ["org/model-GGUF:Q8_0", "smollm2-135m-instruct", "random:config.json"])
def test_whole_models_are_no_drafters_with_heads(fake: FakeHub, name: str) -> None:
    assert drafter_folder(name) is None
    assert not fake.downloads


def test_what_is_no_drafter_is_refused_with_a_remedy(fake: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not on this machine, and --offline forbids downloads. Start once without"):
        drafter_folder("org/model", offline=True)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is one file. Give the directory"):
        drafter_folder(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match="There is no model 'nothing-like-it'"):
        drafter_folder("nothing-like-it")
