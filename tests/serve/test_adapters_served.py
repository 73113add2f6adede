"""Adapters over HTTP: named in every dialect, listed, added, removed, and kept by the next engine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.adapter_files import ATTENTION, write_adapter
from helpers.served import Served, serving, wait_until
from helpers.tiny_server import CONFIG, NAME, tiny_options

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
TURN = [{"role": "user", "content": "Why?"}]
TINY_KV = ("--max-context", "512", "--kv-tokens", "4096")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters `one` to `three`, and `watched`, a directory with the adapter `found`."""
    root = tmp_path_factory.mktemp("adapters")
    values = {name: value for name, value in CONFIG.items() if name != "architectures"}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    for seed, name in enumerate(("one", "two", "three", "watched/found")):
        write_adapter(root / name, base, rank=4, targets=ATTENTION, seed=seed, size=8.0)
    (root / "watched" / "cut").mkdir()
    (root / "watched" / "cut" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (root / "watched" / "cut" / "adapter_model.safetensors").write_bytes(b"cut")
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (root / "broken" / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    return root


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    given = ("--lora-modules", f"one={folder / 'one'}", f"two={folder / 'two'}", "--allow-adapters")
    watched = ("--adapter-dir", str(folder / "watched"))
    objectives = ("--slos", "adapter one: itl p90 < 60 s; adapter cut: errors < 1%; errors < 1%")
    with serving(*tiny_options(folder), *TINY_KV, *given, *watched, *objectives) as server:
        yield server


def ask(served: Served, method: str, where: str, status: int = 200, /, **body: Any) -> Any:
    found, answer = served.request(method, where, body or None)
    assert found == status, answer
    return answer


def said(served: Served, model: str) -> str:
    answer = ask(served, "POST", "/v1/completions", model=model, prompt="Why", max_tokens=12, temperature=0)
    assert answer["model"] == model
    text: str = answer["choices"][0]["text"]
    return text


def test_every_dialect_takes_the_name(served: Served) -> None:
    name = f"{NAME}:one"
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": TURN, "max_tokens": 12, "temperature": 0},
        "/v1/responses": {"input": "Why?", "max_output_tokens": 12, "temperature": 0},
        "/v1/messages": {"messages": TURN, "max_tokens": 12, "temperature": 0},
        "/api/chat": {"messages": TURN, "stream": False, "options": {"num_predict": 12, "temperature": 0}},
        "/api/generate": {"prompt": "Why?", "stream": False, "options": {"num_predict": 12, "temperature": 0}},
        "/v1/embeddings": {"input": "Why?"},
        "/api/embed": {"input": "Why?"},
    }

    def content(answer: dict[str, Any]) -> str:
        parts = ("choices", "output", "content", "message", "response", "data", "embeddings")
        return re.sub(r'"?id\'?: [^,]*', "", repr([answer.get(key) for key in parts]))

    for path, body in asked.items():
        adapted, base = (ask(served, "POST", path, **body, model=model) for model in (name, NAME))
        assert (adapted["model"], base["model"]) == (name, NAME), path
        assert content(adapted) != content(base), path
    assert len({said(served, model) for model in (NAME, name, f"{NAME}:two", f"{NAME}:found")}) == 4


def test_lists_show_adapters_beside_their_model(served: Served) -> None:
    ids = {one["id"]: one.get("parent") for one in ask(served, "GET", "/v1/models")["data"]}
    assert ids.items() >= {NAME: None, f"{NAME}:one": NAME, f"{NAME}:two": NAME, f"{NAME}:found": NAME}.items()
    assert ask(served, "GET", f"/v1/models/{NAME}:one")["parent"] == NAME
    assert f"{NAME}:one" in {one["name"] for one in ask(served, "GET", "/api/tags")["models"]}
    assert "ADAPTER one" in ask(served, "POST", "/api/show", model=f"{NAME}:one")["modelfile"]
    said(served, f"{NAME}:two")
    two = ask(served, "GET", "/v1/adapters/two")
    assert (two["id"], two["status"], two["max_rank"]) == (f"{NAME}:two", "resident", 4)
    wait_until(lambda: served.metric('millrace_adapter_ended_requests_total{adapter="two"}') >= 1, "counted")


def test_added_replaced_and_removed(served: Served, folder: Path) -> None:
    path = str(folder / "three")
    ask(served, "GET", "/v1/adapters/three", 404)
    assert ask(served, "POST", "/v1/adapters", name="three", path=path)["id"] == f"{NAME}:three"
    first = said(served, f"{NAME}:three")
    assert ask(served, "POST", "/v1/adapters", 409, name="three", path=path)["error"]["code"] == "conflict"
    ask(served, "POST", "/v1/adapters", name="three", path=str(folder / "two"), replace=True)
    assert said(served, f"{NAME}:three") == said(served, f"{NAME}:two") != first
    assert ask(served, "DELETE", f"/v1/adapters/{NAME}:three")["deleted"]
    refused = ask(served, "POST", "/v1/completions", 404, model=f"{NAME}:three", prompt="Why")
    assert f"{NAME}:one" in refused["error"]["message"]
    assert "Success" in ask(served, "POST", "/v1/load_lora_adapter", lora_name="v", lora_path=path)
    assert ask(served, "POST", "/v1/completions", model="v", prompt="Why", max_tokens=2)["model"] == f"{NAME}:v"
    assert "Success" in ask(served, "POST", "/v1/unload_lora_adapter", lora_name="v")
    ask(served, "POST", "/v1/unload_lora_adapter", 404, lora_name="v")


def test_what_cannot_be_an_adapter_is_refused(served: Served, folder: Path) -> None:
    refused = ask(served, "POST", "/v1/adapters", 400, name="bad", path=str(folder / "broken"))
    assert "is a pickle, which can run any code" in refused["error"]["message"]
    refused = ask(served, "POST", "/v1/adapters", 400, name="a b", path=str(folder / "one"))
    assert "is no name for an adapter" in refused["error"]["message"]


def test_clients_do_not_see_where_a_bad_adapter_is(served: Served, folder: Path) -> None:
    failed = ask(served, "POST", "/v1/completions", 500, model=f"{NAME}:cut", prompt="Why")["error"]["message"]
    assert "'cut' cannot be used" in failed
    assert str(folder) not in failed
    path = str(folder / "watched" / "cut" / "adapter_model.safetensors")
    assert path in ask(served, "GET", "/v1/adapters/cut")["failure"], "without keys everybody is an operator"
    assert path in served.log


def test_objectives_of_adapters_count_their_requests_alone(served: Served) -> None:
    def counts() -> list[tuple[int, int]]:
        return [(one["good"], one["total"]) for one in ask(served, "GET", "/v1/stats")["slos"]]

    def answered(prefix: str, labels: str = "") -> tuple[float, float]:
        asked, failed = (served.metric(f"{prefix}_{kind}_requests_total{labels}") for kind in ("asked", "failed"))
        return asked - failed, asked

    before, labels = answered("millrace_adapter", '{adapter="cut"}'), '{adapter="cut"}'
    said(served, NAME), said(served, f"{NAME}:one")
    ask(served, "POST", "/v1/completions", 500, model=f"{NAME}:cut", prompt="Why")
    assert answered("millrace_adapter", labels) == (before[0], before[1] + 1)
    wait_until(lambda: counts()[1] == answered("millrace_adapter", labels), "the failed request counts")
    wait_until(lambda: counts()[2] == answered("millrace"), "all requests count")
    assert counts()[2][1] > counts()[1][1]
    wait_until(lambda: counts()[0][1] >= 11, "the gaps of the adapter's 12 tokens count")


def test_a_canary_is_started_seen_promoted_and_taken_back(served: Served, folder: Path) -> None:
    ask(served, "POST", "/v1/adapters", name="slow/roast", path=str(folder / "one"))
    where, name = "/v1/adapters/slow%2Froast/canary", f"{NAME}:slow/roast"
    old, new = said(served, name), said(served, f"{NAME}:two")
    refused = ask(served, "POST", where, 400, path=str(folder / "broken"))
    assert "is a pickle" in refused["error"]["message"]
    started = ask(served, "POST", where, path=str(folder / "two"), share=0.5)["canary"]
    assert (started["status"], started["share"]) == ("running", 0.5)
    assert [said(served, name) for _ in range(4)] == [old, new, old, new]
    labels = '{adapter="slow/roast",version="new"}'
    wait_until(lambda: served.metric(f"millrace_adapter_canary_requests{labels}") == 2, "counted")
    assert ask(served, "DELETE", where)["canary"]["status"] == "aborted"
    assert said(served, name) == said(served, name) == old
    ask(served, "POST", where, path=str(folder / "two"))
    promoted = ask(served, "POST", f"{where}/promote")
    assert (promoted["canary"]["status"], promoted["path"]) == ("promoted", str(folder / "two"))
    assert said(served, name) == said(served, name) == new
    ask(served, "DELETE", where, 404)


def test_the_next_engine_has_what_was_added(served: Served, folder: Path) -> None:
    ask(served, "POST", "/v1/adapters", name="kept", path=str(folder / "three"))
    before, starts = said(served, f"{NAME}:kept"), served.metric("millrace_engine_starts_total")
    ask(served, "POST", "/v1/adapters/kept/canary", path=str(folder / "two"), share=0.5)
    assert said(served, f"{NAME}:kept") == before
    canary = ask(served, "GET", "/v1/adapters/kept")["canary"]
    assert (canary["status"], canary["old"]["requests"]) == ("running", 1)
    os.kill(served.child("engine_child"), signal.SIGKILL)
    wait_until(lambda: served.metric("millrace_engine_starts_total") > starts, "the next engine")
    wait_until(lambda: served.request("GET", "/v1/adapters/kept")[0] == 200, "the adapter is back")
    assert ask(served, "GET", "/v1/adapters/kept")["canary"] == canary
    assert said(served, f"{NAME}:kept") == said(served, f"{NAME}:two"), "every second request, as before"
    assert said(served, f"{NAME}:kept") == before
