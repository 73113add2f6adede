"""Models that the stock `ollama` client creates: adapters, system prompts and parameters on a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ollama
import pytest
import transformers
from helpers.adapter_files import ATTENTION, write_adapter
from helpers.served import Served, serving, wait_until
from helpers.tiny_server import CONFIG, NAME, tiny_options

from millrace import cli

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
HI = [{"role": "user", "content": "Why?"}]
GREEDY = {"temperature": 0, "num_predict": 8}


def adapter(folder: Path, seed: int) -> Path:
    values = {name: value for name, value in CONFIG.items() if name != "architectures"}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    return write_adapter(folder, base, rank=4, targets=ATTENTION, seed=seed, size=8.0)


def uploaded(client: ollama.Client, folder: Path) -> dict[str, str]:
    names = ("adapter_config.json", "adapter_model.safetensors")
    return {name: client.create_blob(folder / name) for name in names}


def said(client: ollama.Client, model: str) -> str:
    answer = client.chat(model, HI, options=GREEDY)
    assert answer.model == model.removesuffix(":latest")
    return str(answer.message.content)


def test_an_adapter_of_a_client_is_a_model(tmp_path: Path) -> None:
    options = (*tiny_options(tmp_path), "--max-context", "512", "--kv-tokens", "4096", "--allow-adapters")
    folder = adapter(tmp_path / "one", 1)

    def start(stack: ExitStack) -> tuple[Served, ollama.Client]:
        served = stack.enter_context(serving(*options))
        return served, ollama.Client(f"http://127.0.0.1:{served.port}")

    with ExitStack() as stack:
        served, client = start(stack)
        url = f"http://127.0.0.1:{served.port}"
        files = uploaded(client, folder)
        assert served.request("HEAD", f"/api/blobs/{files['adapter_config.json']}")[0] == 200
        assert served.request("HEAD", "/api/blobs/sha256:" + 64 * "0")[0] == 404
        assert served.request("POST", "/api/blobs/sha256:" + 64 * "0", "other bytes")[0] == 400
        done = client.create("mario", from_=NAME, adapters=files, system="Be Mario.", parameters={"top_k": 7})
        assert done.status == "success"
        adapted = said(client, "mario:latest")
        assert adapted != said(client, NAME)
        direct: Any = served.request("POST", "/v1/adapters", {"name": "same", "path": str(folder)})[0]
        assert direct == 200
        prompt = [{"role": "system", "content": "Be Mario."}, *HI]
        assert client.chat(f"{NAME}:same", prompt, options=GREEDY).message.content == adapted
        for name, path in (("models", "/api/tags"), ("data", "/v1/models")):
            listed = [one.get("name") or one["id"] for one in served.request("GET", path)[1][name]]
            assert "mario" in listed
            assert f"{NAME}:mario" not in listed
        shown = client.show("mario").modelfile or ""
        assert 'SYSTEM """Be Mario."""' in shown
        assert "PARAMETER top_k 7" in shown
        body = {"model": "mario", "messages": HI, "max_tokens": 8, "temperature": 0}
        answer = served.request("POST", "/v1/chat/completions", body)[1]
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("mario", adapted)
        (tmp_path / "Modelfile").write_text(f"FROM {NAME}\nADAPTER one\nSYSTEM Be Mario.\n")
        assert cli.main(["create", "plumber", "-f", str(tmp_path / "Modelfile"), "--url", url]) == 0
        assert said(client, "plumber") == adapted
        client.delete("plumber")
        client.copy("mario", "luigi:v2")
        assert said(client, "luigi:v2") == adapted
        # Names that look alike, and one name at once: each model has files of its own.
        for name in ("toad/1", "toad--1"):
            client.create(name, from_=NAME, adapters=files, system="Be Mario.")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.create("toad:1", from_=NAME, adapters=files), range(4)))
        client.delete("toad/1")
        assert len(list((tmp_path / "data" / "created" / "adapters").iterdir())) == 4
        assert said(client, "toad--1") == adapted
    with ExitStack() as stack:
        served, client = start(stack)
        assert (said(client, "mario"), said(client, "luigi:v2")) == (adapted, adapted)
        client.delete("mario")
        with pytest.raises(ollama.ResponseError, match="not served here"):
            said(client, "mario")
        assert (said(client, "luigi:v2"), said(client, "toad--1")) == (adapted, adapted)
        assert said(client, "toad:1")
        for name in ("luigi:v2", "toad--1", "toad:1"):
            client.delete(name)
        wait_until(lambda: served.request("GET", "/v1/adapters")[1]["data"] == [], "no adapter is left")
        assert not list((tmp_path / "data" / "created" / "adapters").iterdir())


def test_what_cannot_be_created_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "bad" / "adapter_config.json"
    config.parent.mkdir()
    config.write_text('{"peft_type": "LORA"}')
    weights = config.with_name("adapter_model.safetensors")
    weights.write_bytes(b"no safetensors")
    with serving(*tiny_options(tmp_path), "--max-context", "512", "--kv-tokens", "4096", "--allow-adapters") as served:
        client = ollama.Client(f"http://127.0.0.1:{served.port}")
        files = uploaded(client, config.parent)
        refused: tuple[tuple[dict[str, Any], str], ...] = (
            ({"template": "{{ .Prompt }}"}, "template"),
            ({"messages": HI}, "messages"),
            ({"files": {"model.gguf": "sha256:" + 64 * "0"}}, "files"),
            ({"parameters": {"num_ctx": 100_000}}, "num_ctx is 100000"),
            ({"parameters": {"tfs_z": 0.5}}, "tfs_z"),
            ({"parameters": {"warmth": 1}}, "warmth"),
            ({"parameters": {"temperature": -1.0}}, "temperature"),
            ({"adapters": {"lora.gguf": "sha256:" + 64 * "0"}}, "GGUF files are not read"),
            ({"adapters": {"adapter_config.json": files["adapter_config.json"]}}, "has no adapter_model.safetensors"),
            ({"adapters": {**files, "adapter_config.json": "sha256:" + 64 * "0"}}, "There is no file"),
            ({"adapters": files}, "cannot be read as safetensors"),
            ({"from_": "other"}, "not served here"),
        )
        for fields, what in refused:
            with pytest.raises(ollama.ResponseError, match=what) as found:
                client.create("new", **{"from_": NAME, **fields})
            assert str(tmp_path) not in str(found.value)
        with pytest.raises(ollama.ResponseError, match="another name"):
            client.create(NAME, from_=NAME)
        for name in (".hidden", "/etc", "random:tiny", "twice:latest:latest"):  # /api/delete would not take them.
            with pytest.raises(ollama.ResponseError, match="is no name for a model"):
                client.create(name, from_=NAME)
        assert [one["name"] for one in served.request("GET", "/api/tags")[1]["models"]] == [NAME]
        client.create("kind", from_=NAME, system="Be kind.", parameters={"stop": ["x"], "temperature": 0.0})
        client.create("kinder", from_="kind", system="Be kinder.")
        assert 'PARAMETER stop "x"' in (client.show("kinder").modelfile or "")
        assert said(client, "kind") != said(client, "kinder")


def test_a_modelfile_is_written_and_read_with_all_its_parameters(tmp_path: Path) -> None:
    written = (
        f'FROM {NAME}\nSYSTEM """\nBe brief.\n"""\nPARAMETER temperature 0\nPARAMETER repeat_penalty 1.1\n'
        'PARAMETER num_ctx 256\nPARAMETER num_predict 3\nPARAMETER mirostat 0\nPARAMETER stop "a b"\n'
    )
    without_effect = "PARAMETER num_gpu 1\nPARAMETER use_mmap true\nPARAMETER penalize_newline true\n"
    with serving(*tiny_options(tmp_path), "--max-context", "512", "--kv-tokens", "4096") as served:
        url = f"http://127.0.0.1:{served.port}"
        client = ollama.Client(url)
        (tmp_path / "Modelfile").write_text(written + without_effect)
        assert cli.main(["create", "brief", "-f", str(tmp_path / "Modelfile"), "--url", url]) == 0
        shown = client.show("brief").modelfile or ""
        assert sorted(shown.splitlines()) == sorted(written.splitlines())
        assert client.chat("brief", HI).eval_count == 3
        assert client.generate("brief", "Why?", options={"num_predict": 5}).eval_count == 5
        with pytest.raises(ollama.ResponseError, match="num_ctx is 256"):
            client.chat("brief", [{"role": "user", "content": "why " * 300}])
        (tmp_path / "Modelfile").write_text(shown)
        assert cli.main(["create", "briefer", "-f", str(tmp_path / "Modelfile"), "--url", url]) == 0
        assert client.show("briefer").modelfile == shown
