"""The models of one server and the settings of each: from the command line and the tables [models.NAME] of the file.

[models.chat]
source = "smollm2-135m-instruct"   # if missing, the name is the source
aliases = "default, gpt-4o-mini"   # further names in the API
kv_gib = 2                         # any setting of model, plan, memory or run, without its section
keep_alive_s = 600
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.config import Config, LoadedConfig, all_settings, replace
from millrace.errors import ConfigError

PER_MODEL = ("model", "plan", "memory", "run")
"""Sections whose settings may differ between the models of a server."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    name: str
    """In the API."""
    aliases: tuple[str, ...]
    config: Config
    loads_at_start: bool


def settings_of_models(
    loaded: LoadedConfig, sources: Sequence[str], name_of: Callable[[str], str]
) -> tuple[ModelSettings, ...]:
    """The models to serve: `sources` (names of tables, or sources of their own), else all tables, else `model.source`.

    `name_of` returns the default name of a source; it may read the model's files.
    """
    wanted = list(sources) or list(loaded.models) or [loaded.config.model.source]
    if len(wanted) == 1 and wanted[0] not in loaded.models:
        config = replace(loaded.config, model__source=wanted[0])
        return (_of_source(config, wanted[0], name_of, is_first=True),)
    if len(wanted) > 1:
        _refuse_one_name(loaded.config)
    models = tuple(_of_table(loaded, one, name_of, is_first=number == 0) for number, one in enumerate(wanted))
    _check_names(models)
    models = _with_own_step_logs(models)
    if loaded.config.server.in_process and len(models) > 1:
        raise ConfigError(
            f"server.in_process runs one model, but {len(models)} are to be served; remove --in-process.",
            param="server.in_process",
        )
    return models


def _of_table(loaded: LoadedConfig, wanted: str, name_of: Callable[[str], str], *, is_first: bool) -> ModelSettings:
    table = loaded.models.get(wanted)
    if table is None:
        config = replace(loaded.config, model__source=wanted, model__aliases="")
        return _of_source(config, wanted, name_of, is_first=is_first)
    changes: dict[str, object] = {"model__source": wanted, "model__aliases": ""}
    for name, value in table.items():
        changes[_key(wanted, name).replace(".", "__")] = _joined(name, value)
    try:
        config = replace(loaded.config, **changes)
    except ConfigError as error:
        raise ConfigError(f"[models.{wanted}]: {error.message}", param=error.param) from error
    return _settings(config.model.served_name or wanted, config, is_first=is_first)


def _of_source(config: Config, source: str, name_of: Callable[[str], str], *, is_first: bool) -> ModelSettings:
    """A model asked for by its source. A short name, such as one of the catalogue, is also a name in the API."""
    if config.model.served_name:
        return _settings(config.model.served_name, config, is_first=is_first)
    is_short = "/" not in source
    also = f"{config.model.aliases},{source}" if is_short else config.model.aliases
    return _settings(name_of(source), replace(config, model__aliases=also), is_first=is_first)


def _settings(name: str, config: Config, *, is_first: bool) -> ModelSettings:
    """The name is also a setting, because the engine reports it."""
    aliases = tuple(dict.fromkeys(alias.strip() for alias in config.model.aliases.split(",") if alias.strip()))
    aliases = tuple(alias for alias in aliases if alias != name)
    when = config.model.load
    return ModelSettings(
        name=name,
        aliases=aliases,
        config=replace(config, model__served_name=name),
        loads_at_start=is_first if when == "auto" else when == "start",
    )


def _joined(name: str, value: object) -> object:
    """Aliases may also be written as a list."""
    if name == "aliases" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return value


def _key(model: str, name: str) -> str:
    known = _settings_by_name()
    if name not in known:
        from difflib import get_close_matches

        close = get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f" Did you mean '{close[0]}'?" if close else " `millrace config` lists all settings."
        raise ConfigError(f"[models.{model}]: there is no setting '{name}' of a model.{hint}", param=f"models.{model}")
    return known[name]


def _settings_by_name() -> Mapping[str, str]:
    return {entry.name: key for key, entry in all_settings().items() if entry.section in PER_MODEL}


def _with_own_step_logs(models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    """Models that would write the same step log get a file each: `steps.log` becomes `steps.NAME.log`."""
    paths = [model.config.plan.step_log for model in models]
    return tuple(
        dataclasses.replace(model, config=replace(model.config, plan__step_log=_own_path(path, model.name)))
        if path and paths.count(path) > 1
        else model
        for model, path in zip(models, paths, strict=True)
    )


def _own_path(path: str, name: str) -> str:
    plain = re.sub(r"[^\w.-]", "-", name)
    return str(Path(path).with_suffix(f".{plain}{Path(path).suffix}"))


def _refuse_one_name(config: Config) -> None:
    for name, value in (("served_name", config.model.served_name), ("aliases", config.model.aliases)):
        if value:
            raise ConfigError(
                f"model.{name} is {value!r}, but several models are to be served; set it for one of them, in"
                f" [models.NAME] of the settings file.",
                param=f"model.{name}",
            )


def _check_names(models: Sequence[ModelSettings]) -> None:
    owners: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if name in owners:
                raise ConfigError(
                    f"The name {name!r} is given to two models, {owners[name]!r} and {model.name!r}; set another"
                    " served_name or alias for one of them.",
                    param="model.served_name",
                )
            owners[name] = model.name
