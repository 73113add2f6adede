"""`models`, `alias`, `ls`, `rm`, `doctor`: what fits here, names that exist, and models that are in use."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.terminal import on_terminal
from huggingface_hub import constants

from millrace.cli import main
from millrace.commands.setup.checks import Finding, check_model, check_network
from millrace.config import Config, replace
from millrace.host import free_memory
from millrace.sources import estimate
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.resolve import not_found
from millrace.terminal.running_servers import announced


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home in which smollm2 counts as downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    models = tmp_path / "millrace" / "models"
    models.mkdir(parents=True)
    with (models / KNOWN_MODELS[0].file_name).open("wb") as file:
        file.truncate(KNOWN_MODELS[0].num_bytes)
    return tmp_path


@pytest.mark.parametrize(("memory_gb", "mark"), [(4, "too large"), (400, "")])
def test_models_marks_what_does_not_fit(
    home: Path, memory_gb: int, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate, "has_gpu", lambda: False)
    monkeypatch.setattr(estimate, "total_bytes", lambda: memory_gb * 10**9)
    assert main(["models", "llama3.1-8b"]) == 0
    shown = capsys.readouterr().out
    assert ("too large" in shown) == bool(mark)
    assert main(["models", "llama3.1-8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["fits"] is not bool(mark)


@pytest.mark.live
def test_memory_of_a_gpu_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 24564\necho 81559\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert estimate.gpu_bytes() == 81559 << 20
    program.write_text("#!/bin/sh\nexit 9\n")
    assert estimate.gpu_bytes() == 0


def test_an_alias_of_nothing_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alias", "x", "nosuch"]) == 1
    assert "There is no model 'nosuch'." in capsys.readouterr().err
    assert main(["alias", "x", "./nosuch.gguf"]) == 1
    assert main(["alias", "--json"]) == 0
    assert capsys.readouterr().out == "{}\n"


def test_an_alias_is_listed_whatever_name_it_was_given(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alias", "fast", "smollm2"]) == 0
    assert main(["alias", "faster", "fast"]) == 0
    assert "faster now stands for smollm2." in capsys.readouterr().out
    assert main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["aliases"] == ["fast", "faster"]


def test_an_alias_of_a_path_works_in_other_directories(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "model").mkdir()
    monkeypatch.chdir(home)
    assert main(["alias", "mine", "./model"]) == 0
    assert f"mine now stands for {home}/model." in capsys.readouterr().out


def test_the_nearest_name_is_one_that_is_here(home: Path) -> None:
    assert "Did you mean 'smollm2'?" in not_found("smollm").message
    assert "Did you mean 'qwen3-4b'?" in not_found("qwen3-4bb").message


@pytest.fixture
def served(home: Path) -> Iterator[Path]:
    """The file of a model that a server runs."""
    config = replace(Config(), model__source="smollm2")
    with announced({}, None, ["smollm2"]) as announcement:
        announcement.write("smollm2-135m-instruct", "http://127.0.0.1:9", "cpu", config, {"smollm2": config})
        yield home / "millrace" / "models" / KNOWN_MODELS[0].file_name


def test_rm_of_a_served_model_needs_a_yes(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "smollm2-135m"]) == 2
    assert "smollm2-135m is being served on http://127.0.0.1:9" in capsys.readouterr().err
    assert served.exists()
    assert main(["rm", "smollm2-135m", "--yes"]) == 0
    assert not served.exists()


@pytest.mark.live
@pytest.mark.parametrize(("answer", "stays"), [("\r", True), ("y\r", False)])
def test_rm_asks_on_a_terminal(served: Path, answer: str, stays: bool) -> None:
    with on_terminal(["rm", "smollm2"]) as terminal:
        terminal.expect("Delete it all the same? [y/N]")
        terminal.type(answer)
        assert terminal.wait() == (1 if stays else 0)
    assert served.exists() == stays


def test_rm_of_another_model_does_not_ask(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "smollm2"]) == 0
    assert "98 MB are free again" in capsys.readouterr().out


def findings(check: object, **changes: object) -> list[Finding]:
    assert callable(check)
    return list(check(replace(Config(), **changes)))


@pytest.mark.live
def test_doctor_says_whether_the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a hub that takes the connection and then says nothing: the wait is bounded."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert findings(check_network)[0].status == "warning"
    assert "cannot be reached" in findings(check_network)[0].text
    assert findings(check_network, model__offline=True)[0].status == "ok"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("millrace.sources.hub.why_unreachable.__defaults__", (0.2,))
        assert findings(check_network)[0].status == "warning"


def test_doctor_knows_names_that_cannot_be_pulled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.sources.hub.why_unreachable", lambda: "no network in this test")
    unknown = findings(check_model, model__source="nosuch")
    assert (unknown[0].status, unknown[0].fix) == ("problem", "")
    assert "There is no model 'nosuch'." in unknown[0].text
    known = findings(check_model, model__source="qwen3-4b")
    assert (known[0].status, known[0].fix) == ("warning", "millrace pull qwen3-4b")


def test_whole_memory_of_this_machine_is_known() -> None:
    assert free_memory.total_bytes() >= free_memory.available_bytes() > 0
