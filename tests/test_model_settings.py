"""Several models of one server: which are served, under which names, with which settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config import load_config
from millrace.errors import ConfigError
from millrace.model_settings import ModelSettings, settings_of_models
from millrace.sources.default_name import default_name
from millrace.sources.resolve import resolve_model

FILE = """
[memory]
kv_gib = 1
[models.chat]
source = "smollm2-135m-instruct"
aliases = ["default", "small"]
kv_gib = 2
keep_alive_s = 60
[models.gemma-3-270m]
load = "start"
max_context = 512
"""


def models(folder: Path, text: str, *sources: str, **values: object) -> tuple[ModelSettings, ...]:
    path = folder / "m.toml"
    path.write_text(text)
    loaded = load_config(path, {key.replace("__", "."): value for key, value in values.items()})
    return settings_of_models(loaded, sources, default_name)


def test_tables_of_the_file(tmp_path: Path) -> None:
    chat, gemma = models(tmp_path, FILE)
    assert (chat.name, chat.aliases, chat.loads_at_start) == ("chat", ("default", "small"), True)
    assert chat.config.model.source == "smollm2-135m-instruct"
    assert chat.config.model.served_name == "chat"
    assert (chat.config.memory.kv_gib, chat.config.model.keep_alive_s) == (2, 60)
    assert (gemma.name, gemma.config.model.source, gemma.loads_at_start) == ("gemma-3-270m", "gemma-3-270m", True)
    assert (gemma.config.memory.kv_gib, gemma.config.model.max_context) == (1, 512)


def test_the_command_line_chooses_tables_and_further_models(tmp_path: Path) -> None:
    gemma, other = models(tmp_path, FILE, "gemma-3-270m", "qwen2.5-coder-1.5b")
    assert gemma.config.model.max_context == 512
    assert (other.name, other.loads_at_start, other.config.memory.kv_gib) == ("qwen2.5-coder-1.5b", False, 1)
    [one] = models(tmp_path, "", "smollm2-135m-instruct", model__served_name="gpt", model__aliases="a, b ,gpt")
    assert (one.name, one.aliases) == ("gpt", ("a", "b"))
    [short] = models(tmp_path, "", "smollm2", model__aliases="a")
    assert (short.name, short.aliases) == ("smollm2-135m-instruct", ("a", "smollm2"))
    [path] = models(tmp_path, "", f"random:{tmp_path}")
    assert path.aliases == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\nkv_gb = 1", "models.a.*no setting 'kv_gb'.*kv_gib"),
        ("[models.a]\nport = 1", "models.a.*no setting 'port'"),
        ("[models.a]\nkv_gib = 'x'", "models.a.*kv_gib is 'x'"),
        ("[models]\na = 1", "models.a.*must be a table"),
        ("[models.a]\n[models.b]\naliases = 'a'", "'a' is given to two models"),
        ("[model]\nserved_name = 'x'\n[models.a]\n[models.b]", "served_name is 'x', but several"),
        ("[server]\nin_process = true\n[models.a]\n[models.b]", "in_process runs one model"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        models(tmp_path, text)


def test_the_default_name_is_that_of_the_resolved_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-one"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"")
    for source in (str(folder), f"random:{folder}", f"random:{folder / 'config.json'}"):
        assert default_name(source) == resolve_model(source).name
    assert default_name("SmolLM2-135M-Instruct") == "smollm2-135m-instruct"
    assert default_name("org/name") == "org/name"


def test_models_never_share_a_step_log(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        '[plan]\nstep_log = "/logs/steps.log"\n[models.chat]\nsource = "a"\n[models."org/code"]\nsource = "b"\n'
        '[models.own]\nsource = "c"\nstep_log = "/logs/own.log"\n'
    )
    models = settings_of_models(load_config(file), [], lambda source: source)
    assert [model.config.plan.step_log for model in models] == [
        "/logs/steps.chat.log",
        "/logs/steps.org-code.log",
        "/logs/own.log",
    ]
    [alone] = settings_of_models(load_config(file), ["chat"], lambda source: source)
    assert alone.config.plan.step_log == "/logs/steps.log"
