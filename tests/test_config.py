"""Settings: precedence of the three layers, types, ranges, and hints for misspelt names."""

from __future__ import annotations

import tomllib
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.config import Config, Setting, all_settings, as_dict, from_dict, load_config, replace
from millrace.errors import ConfigError
from millrace.terminal.settings_table import toml_lines


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_and_their_sources() -> None:
    loaded = load_config()
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}
    assert set(loaded.sources) == set(all_settings())


def test_file_overrides_default_and_command_line_overrides_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[server]\nport = 9000\nhost = "0.0.0.0"\n[model]\ndtype = "float32"\n')
    loaded = load_config(file, {"server.port": "9100"})
    assert (loaded.config.server.port, loaded.sources["server.port"]) == (9100, "command line")
    assert (loaded.config.server.host, loaded.sources["server.host"]) == ("0.0.0.0", str(file))
    assert (loaded.config.model.dtype, loaded.sources["model.dtype"]) == ("float32", str(file))
    assert (loaded.config.plan.max_running, loaded.sources["plan.max_running"]) == (0, "default")


def test_loaded_tree_cannot_be_changed() -> None:
    loaded = load_config()
    with pytest.raises(AttributeError):
        loaded.config.server.port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        loaded.sources["server.port"] = "me"  # type: ignore[index]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("server.prot", "server.port"),
        ("server.Port", "server.port"),
        ("plan.max_runing", "plan.max_running"),
        ("server.dtype", "model.dtype"),
        ("memory.kv_gb", "memory.kv_gib"),
    ],
)
def test_misspelt_name_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"no setting '{key}'.*Did you mean '{nearest}'"):
        load_config(None, {key: 1})


def test_unknown_name_points_to_the_list() -> None:
    with pytest.raises(ConfigError, match="millrace config"):
        load_config(None, {"zzzzzz.qqqq": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server]\nprot = 1\n", "server.prot"),
        ("port = 8000\n", "must be in a section"),
        ("[server]\nport = \n", "not valid TOML"),
        ("[server]\nport = 8000.5\n", "whole number"),
        ('[server]\nport = "eighty"\n', "whole number"),
        ("[server]\nport = true\n", "whole number"),
        ("[server]\nhost = 3\n", "must be a string"),
        ("[server]\nin_process = 1\n", "true or false"),
        ('[model]\ndtype = "int3"\n', "must be one of auto, float32, bfloat16, float16"),
        ("[model]\ndtype = []\n", "must be one of"),
        ("[memory]\nkv_gib = nan\n", "kv_gib"),
        ("[server]\nport = -1\n", "from 0 to 65535"),
        ("[plan]\nmax_running = -1\n", "at least 0"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path, text))


def test_missing_file_directory_and_binary_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no settings file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError):
        load_config(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(binary)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"plan.token_budget": 8, "plan.max_running": 16}, "token_budget is 8, below plan.max_running 16"),
        ({"memory.kv_gib": 1.0, "memory.kv_tokens": 100}, "set only one"),
        ({"server.in_process": True, "server.fronts": 2}, "set only one"),
        ({"server.port": 65536}, "from 0 to 65535"),
        ({"memory.fraction": 1.5}, "from 0 to 1"),
    ],
)
def test_contradictions_are_refused_with_both_settings_named(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, settings)


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
def test_nan_and_infinity_are_refused(value: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, {"memory.kv_gib": value})


def test_replace_checks_like_a_layer() -> None:
    assert replace(Config(), server__port=9).server.port == 9
    with pytest.raises(ConfigError, match="Did you mean 'server.port'"):
        replace(Config(), server__prot=9)
    with pytest.raises(ConfigError, match="below plan.max_running"):
        replace(Config(), plan__token_budget=1, plan__max_running=2)


def test_flags_are_unique_and_every_setting_has_help() -> None:
    flags = [setting.flag for setting in all_settings().values()]
    assert len(flags) == len(set(flags))
    assert all(setting.help for setting in all_settings().values())


def legal_value(setting: Setting) -> st.SearchStrategy[Any]:
    if typing.get_origin(setting.kind) is Literal:
        return st.sampled_from(typing.get_args(setting.kind))
    if setting.kind is bool:
        return st.booleans()
    if setting.kind is str:
        # A lone surrogate cannot be encoded as UTF-8.
        return st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    low = setting.minimum or 0
    if setting.kind is int:
        return st.integers(int(low), 60_000)
    return st.floats(low, 1.0 if setting.name == "fraction" else 1e6)


def any_settings() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={key: legal_value(setting) for key, setting in all_settings().items()})


@given(any_settings())
def test_accepted_settings_survive_toml_and_text(settings: dict[str, Any]) -> None:
    """The tree printed as TOML, or given as command-line strings, loads as the same tree."""
    try:
        loaded = load_config(None, settings)
    except ConfigError:
        return  # Two legal values can contradict each other.
    for key, value in settings.items():
        section, _, name = key.partition(".")
        assert as_dict(loaded.config)[section][name] == value
        assert loaded.sources[key] == "command line"
    printed = tomllib.loads("\n".join(toml_lines(loaded)))
    flat = {f"{section}.{name}": value for section, table in printed.items() for name, value in table.items()}
    assert load_config(None, flat).config == loaded.config
    as_text = {key: str(value) for key, value in settings.items()}
    assert load_config(None, as_text).config == loaded.config


ANYTHING = st.one_of(st.none(), st.text(max_size=8), st.integers(), st.floats(), st.lists(st.integers(), max_size=2))


@given(st.sampled_from(sorted(all_settings())), ANYTHING)
@example("memory.kv_disk_key", "0")
def test_any_single_value_is_accepted_or_refused_by_key(key: str, value: object) -> None:
    try:
        loaded = load_config(None, {key: value})
    except ConfigError as error:
        assert key in str(error) or all_settings()[key].flag in str(error)
        return
    section, _, name = key.partition(".")
    assert isinstance(as_dict(loaded.config)[section][name], (int, float, str, bool))


def test_environment_is_between_file_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "[server]\nport = 9000\n[memory]\nkv_gib = 3.0\n[plan]\nprefix_cache = true\n")
    for name, value in {
        "PORT": "9001",
        "KV_GIB": "1.5",
        "PREFIX_CACHE": "false",
        "MODEL": "m",
        "CONFIG": str(file),
    }.items():
        monkeypatch.setenv(f"MILLRACE_{name}", value)
    loaded = load_config(None, {"memory.kv_gib": "0.5"})
    config = loaded.config
    assert (config.server.port, config.memory.kv_gib, config.plan.prefix_cache, config.model.source) == (
        *(9001, 0.5, False),
        "m",
    )
    assert loaded.sources["server.port"] == "MILLRACE_PORT"
    assert loaded.sources["memory.kv_gib"] == "command line"


def test_unknown_variable_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_PROT", "1")
    with pytest.raises(ConfigError, match=r"MILLRACE_PROT is no setting\. Did you mean MILLRACE_PORT\?"):
        load_config()
    monkeypatch.delenv("MILLRACE_PROT")
    monkeypatch.setenv("MILLRACE_PORT", "many")
    with pytest.raises(ConfigError, match=r"MILLRACE_PORT: server\.port is 'many'"):
        load_config()


def test_child_processes_take_the_tree_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = as_dict(replace(Config(), server__port=1234))
    monkeypatch.setenv("MILLRACE_PORT", "9001")
    assert from_dict(tree).server.port == 1234
