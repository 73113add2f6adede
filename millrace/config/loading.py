"""Loading: merges the defaults, a TOML file, the environment and the command line into one tree, and checks it.

Each setting knows its flag and variable and, once loaded, the layer that set it.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from millrace.config.environment import ENVIRONMENT_PREFIX, setting_variables, settings_file
from millrace.config.sections import Config
from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the tree: its key, type, default, help text and range."""

    section: str
    name: str
    kind: Any
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def expected(self) -> str:
        """The legal values in words, for errors."""
        if typing.get_origin(self.kind) is Literal:
            return f"one of {', '.join(typing.get_args(self.kind))}"
        words = {bool: "true or false", str: "a string", int: "a whole number", float: "a finite number"}[self.kind]
        if self.minimum is not None and self.maximum is not None:
            return f"{words} from {self.minimum:g} to {self.maximum:g}"
        return words if self.minimum is None else f"{words} of at least {self.minimum:g}"

    def convert(self, raw: object, shown_as: str) -> object:
        """`raw`, or the value that a string spells. `shown_as` names the setting in the error."""
        import msgspec  # Not at the top of the file: `--help` should not pay for the import.

        kind = self.kind
        if kind in (int, float):
            largest = sys.float_info.max if kind is float else None  # Excludes infinity.
            bounds = msgspec.Meta(ge=self.minimum, le=largest if self.maximum is None else self.maximum)
            kind = Annotated[kind, bounds]
        try:
            return msgspec.convert(raw, kind, strict=not isinstance(raw, str))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{shown_as} is {raw!r}; it must be {self.expected}.", param=self.key) from error


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The tree, and for each key the layer that set it: "default", the path of the TOML file, the name of a variable,
    or "command line"."""

    config: Config
    sources: Mapping[str, str]
    models: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """The tables [models.NAME] of the TOML file: settings by name, without their section."""


def all_settings() -> dict[str, Setting]:
    """Every setting by its dotted key, in the order of the tree. Names are unique, so flags need no section."""
    found: dict[str, Setting] = {}
    for section, section_type in typing.get_type_hints(Config).items():
        kinds = typing.get_type_hints(section_type)
        for declared in fields(section_type):
            entry = Setting(section, declared.name, kinds[declared.name], declared.default, **declared.metadata)
            found[entry.key] = entry
    return found


def load_config(
    toml_path: Path | None = None, values: Mapping[str, object] | None = None, *, origin: str = "command line"
) -> LoadedConfig:
    """Merge defaults, TOML file, `MILLRACE_*` variables and `values` (dotted key to string or value of the right type).

    `origin` names the layer of `values` in errors and in `sources`. Without a path, MILLRACE_CONFIG names the file.
    """
    known = all_settings()
    merged = {key: entry.default for key, entry in known.items()}
    sources = dict.fromkeys(known, "default")
    layers: list[tuple[str, Mapping[str, object]]] = []
    models: dict[str, dict[str, object]] = {}
    toml_path = toml_path or settings_file()
    if toml_path is not None:
        flat = _read_toml(toml_path)
        models = _model_tables(toml_path, flat)
        layers.append((str(toml_path), flat))
    layers += [(variable, {key: text}) for variable, key, text in _from_environment(known)]
    layers.append((origin, values or {}))
    for layer_origin, layer in layers:
        for key, raw in layer.items():
            if key not in known:
                raise ConfigError(f"{layer_origin}: there is no setting '{key}'.{_nearest(key, known)}", param=key)
            merged[key] = known[key].convert(raw, f"{layer_origin}: {key}")
            sources[key] = layer_origin
    return LoadedConfig(_build(merged), types.MappingProxyType(sources), models)


def _from_environment(known: Mapping[str, Setting]) -> Iterator[tuple[str, str, str]]:
    """(variable, key, text) of every `MILLRACE_*` variable. Raises for one that no setting has."""
    by_variable = {entry.variable: key for key, entry in known.items()}
    by_variable[ENVIRONMENT_PREFIX + "MODEL"] = "model.source"
    for variable, text in setting_variables():
        if variable not in by_variable:
            close = difflib.get_close_matches(variable, by_variable, n=1, cutoff=0.6)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"The environment variable {variable} is no setting.{hint} Unset or rename it.")
        yield variable, by_variable[variable], text


def _read_toml(path: Path) -> dict[str, object]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no settings file {path}.") from error
    except OSError as error:
        raise ConfigError(f"The settings file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    flat: dict[str, object] = {}
    for section, table in tree.items():
        if not isinstance(table, dict):
            hint = _nearest(section, all_settings())
            raise ConfigError(f"{path}: '{section}' must be in a section, such as [server].{hint}")
        flat.update({f"{section}.{name}": value for name, value in table.items()})
    return flat


def _model_tables(path: Path, flat: dict[str, object]) -> dict[str, dict[str, object]]:
    """Take the tables [models.NAME] out of the file's settings."""
    tables: dict[str, dict[str, object]] = {}
    for key in [key for key in flat if key.startswith("models.")]:
        name, table = key.removeprefix("models."), flat.pop(key)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: '{key}' must be a table, such as [models.chat].", param=key)
        tables[name] = table
    return tables


def _nearest(key: str, known: Mapping[str, Setting]) -> str:
    """A hint with the setting that `key` probably means."""
    by_name = {entry.name: full for full, entry in known.items()}
    in_another_section = by_name.get(key.rpartition(".")[2])
    close = [in_another_section] if in_another_section else difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        names = difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.6)
        close = [by_name[name] for name in names]
    return f" Did you mean '{close[0]}'?" if close else " `millrace config` lists all settings."


def _build(values: Mapping[str, object]) -> Config:
    """The tree of these values, one for each key, after a check that they fit together."""
    sections = {}
    for section, section_type in typing.get_type_hints(Config).items():
        sections[section] = section_type(
            **{declared.name: values[f"{section}.{declared.name}"] for declared in fields(section_type)}
        )
    config = Config(**sections)
    _check_combinations(config)
    return config


def _check_combinations(config: Config) -> None:
    plan, memory, server = config.plan, config.memory, config.server
    if plan.token_budget and plan.token_budget < plan.max_running:
        raise ConfigError(
            f"plan.token_budget is {plan.token_budget}, below plan.max_running {plan.max_running}: each running request"
            f" adds one token to a step, so a step could exceed twice its budget. Set token_budget to at least"
            f" {plan.max_running}, or max_running to at most {plan.token_budget}.",
            param="plan.token_budget",
        )
    if memory.kv_gib and memory.kv_tokens:
        raise ConfigError(
            f"memory.kv_gib is {memory.kv_gib:g} and memory.kv_tokens is {memory.kv_tokens}, but both set the size of"
            " the KV pool; set only one.",
            param="memory.kv_gib",
        )
    if memory.kv_host_gib and not plan.prefix_cache:
        raise ConfigError(
            f"memory.kv_host_gib is {memory.kv_host_gib:g}, but plan.prefix_cache is off, so no KV block is ever used"
            " again; set only one of the two.",
            param="memory.kv_host_gib",
        )
    _check_disk(config)
    if server.in_process and server.fronts > 1:
        raise ConfigError(
            f"server.in_process runs one front, but server.fronts is {server.fronts}; set only one of the two.",
            param="server.fronts",
        )


def _check_disk(config: Config) -> None:
    memory, plan = config.memory, config.plan
    if bool(memory.kv_disk) != bool(memory.kv_disk_gib):
        missing = "kv_disk_gib" if memory.kv_disk else "kv_disk"
        raise ConfigError(
            "--kv-disk names a directory for KV blocks and --kv-disk-gib their size: set both or none.",
            param=f"memory.{missing}",
        )
    if not memory.kv_disk:
        if memory.kv_disk_key:
            raise ConfigError(
                "--kv-disk-key encrypts the blocks of --kv-disk, which is not set: set both, or leave the key out.",
                param="memory.kv_disk_key",
            )
        return
    if not memory.kv_host_gib:
        raise ConfigError(
            "KV blocks go to --kv-disk through host memory: set --kv-host-gib too, 1 or more.",
            param="memory.kv_host_gib",
        )
    steps_elsewhere = {"--mirror": plan.mirror, "--step-log": bool(plan.step_log)}
    if given := [name for name, is_given in steps_elsewhere.items() if is_given]:
        raise ConfigError(
            f"With {given[0]} steps run elsewhere too, which would need the blocks of --kv-disk; set only"
            " one of the two.",
            param="memory.kv_disk",
        )


def replace(config: Config, **changes: object) -> Config:
    """A copy with some settings changed. Keys have two underscores for the dot: `replace(config, model__dtype=…)`."""
    known = all_settings()
    values = {key: getattr(getattr(config, entry.section), entry.name) for key, entry in known.items()}
    for name, value in changes.items():
        key = name.replace("__", ".")
        if key not in values:
            raise ConfigError(f"There is no setting '{key}'.{_nearest(key, known)}", param=key)
        values[key] = known[key].convert(value, key)
    return _build(values)


def as_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(tree: Mapping[str, Mapping[str, object]]) -> Config:
    """The inverse of `as_dict`, for passing a config to another process."""
    known = all_settings()
    flat = {f"{section}.{name}": value for section, table in tree.items() for name, value in table.items()}
    return _build({key: known[key].convert(value, key) for key, value in flat.items()})
