"""The comparison of the catalogue with the hub, against answers in the form that the hub's API gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_hub import COMMIT, FakeHub, running_hub
from huggingface_hub import constants

from millrace.cli import main
from millrace.sources.catalogue import CatalogueEntry, find_entry
from millrace.sources.catalogue.check import check_entries, last_check

pytestmark = pytest.mark.live


def recorded(repo: str, files: dict[str, int], *, parameters: int = 0, **more: Any) -> dict[str, Any]:
    """What `/api/models/REPO?blobs=true` answers, less what nobody reads."""
    siblings = [
        {"rfilename": name, "size": size, "blobId": "0", "lfs": {"sha256": "0" * 64, "size": size, "pointerSize": 135}}
        for name, size in files.items()
    ]
    answer = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "gated": False, "tags": []}
    if parameters:
        answer["safetensors"] = {"parameters": {"BF16": parameters}, "total": parameters}
    return {**answer, "siblings": siblings, **more}


def entry_named(name: str) -> CatalogueEntry:
    entry = find_entry(name)
    assert entry is not None
    return entry


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has smollm2-360m as the catalogue says, smollm2-1.7b with other facts, and no other model."""
    right, wrong = entry_named("smollm2-360m"), entry_named("smollm2-1.7b")
    small = int(right.num_bytes("q4_k_m"))
    answers = [
        recorded(
            right.hub,
            {"model.safetensors": 723_674_912},
            parameters=361_821_120,
            cardData={"license": "apache-2.0"},
            tags=["license:apache-2.0"],
        ),
        recorded(right.gguf, {"SmolLM2-360M-Instruct-Q4_K_M.gguf": small}),
        recorded(wrong.hub, {"model.safetensors": 6_000_000_000}, parameters=3_000_000_000, gated="manual"),
        recorded(wrong.gguf, {"SmolLM2-1.7B-Instruct-Q8_0.gguf": 1_820_000_000}),
    ]
    with running_hub(FakeHub({}, recorded={answer["id"]: answer for answer in answers})) as fake:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        yield fake


def test_an_entry_that_is_right_has_no_problems_and_a_licence(hub: FakeHub) -> None:
    found = check_entries([entry_named("smollm2-360m")]).models["smollm2-360m"]
    assert found.problems == ()
    assert found.licence == "apache-2.0"
    assert found.parameters == 361_821_120


def test_every_difference_is_named(hub: FakeHub) -> None:
    problems = check_entries([entry_named("smollm2-1.7b")]).models["smollm2-1.7b"].problems
    assert any("has 3 billion parameters, not 1.71" in problem for problem in problems)
    assert any("is gated" in problem for problem in problems)
    assert any("no GGUF file for ':Q4_K_M'. It has Q8_0." in problem for problem in problems)
    gone = check_entries([entry_named("qwen3-4b")]).models["qwen3-4b"]
    assert all("The hub has no such model" in problem for problem in gone.problems)
    assert len(gone.problems) == 2


def test_the_list_shows_the_last_check_and_what_is_unchecked(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "smollm2-360m"]) == 0
    assert "Unchecked: names and sizes were entered by hand." in capsys.readouterr().out
    assert main(["models", "smollm2-360m", "--check"]) == 0
    last = last_check()
    assert last is not None
    assert f"Compared with {hub.url} on {last.date}: 1 of 1 are as the hub has them." in capsys.readouterr().out
    assert main(["models", "smollm2-1.7b", "--check"]) == 1
    assert "has 3 billion parameters" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    records = {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert records["smollm2-360m"]["checked"] == records["smollm2-1.7b"]["checked"] == last.date
    assert records["smollm2-360m"]["licence"] == "apache-2.0"
    assert len(records["smollm2-1.7b"]["problems"]) == 3
    assert records["qwen3-4b"]["checked"] is None
    assert records["qwen3-4b"]["licence"] is None
    assert main(["show", "smollm2-360m", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["checked"], shown["licence"]) == (f"on {last.date} against {hub.url}", "apache-2.0")
    assert main(["show", "qwen3-4b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checked"] == "unchecked"


def test_a_hub_out_of_reach_changes_nothing(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = check_entries([entry_named("smollm2-360m")])
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["models", "--check"]) == 1
    assert "The hub at http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert last_check() == before
