"""Settings on the command line: every setting is an option, by its short and by its dotted name."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from typing import Literal

from millrace.config import DEFAULT_MODEL, LoadedConfig, Setting, all_settings, load_config
from millrace.terminal.parser import HelpAll, UsageError

_PREFIX = "setting:"
_SECTIONS = {
    "model": "model",
    "server": "server",
    "plan": "scheduler",
    "memory": "memory",
    "run": "execution",
    "observe": "logging",
}
_COMMON = "common settings"
_FURTHER_NAMES = {
    "model.source": ("--model",),
    "model.tool_format": ("--tool-call-parser",),
    "model.reasoning_format": ("--reasoning-parser",),
}
"""Other names of options, some of them vLLM's."""
SERVER_SETTINGS = (
    *("server.port", "server.host", "model.max_context", "model.quantization", "memory.kv_gib", "run.device"),
    *("plan.max_running", "server.keys_file", "model.keep_alive_s", "observe.log_level"),
)
"""What `--help` shows of `serve`."""
LOCAL_MODEL_SETTINGS = (
    *("model.source", "model.dtype", "model.quantization", "model.max_context", "model.chat_template"),
    *("memory.kv_gib", "run.device", "run.threads"),
)
"""What `--help` shows of a command that runs one model for one user; `--help-all` shows the rest."""


def add_model(parser: argparse.ArgumentParser) -> None:
    text = "known name, directory, .gguf file, Hugging Face id or random:<config.json>"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{text} (default: {DEFAULT_MODEL})")


def add_models(parser: argparse.ArgumentParser) -> None:
    text = "known name, directory, .gguf file, Hugging Face id, random:<config.json>, or [models.NAME] of the settings"
    parser.add_argument("model", nargs="*", metavar="MODEL", help=f"{text}; several: one server for all")


def add_settings(
    parser: argparse.ArgumentParser,
    *,
    sections: tuple[str, ...] = (),
    taken: tuple[str, ...] = (),
    shown: tuple[str, ...] = (),
) -> None:
    """Add --config and one option per setting, of `sections` only if any are given.

    A short name in `taken` already means something else to this command; that setting has only its dotted option.
    If `shown` is given, `--help` shows only these settings, in this order, and `--help-all` shows all: these first, the
    rest by section.
    """
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML file with settings; options override it")
    groups: dict[str, argparse._ArgumentGroup] = {}
    hidden: dict[argparse.Action, str] = {}
    every = all_settings()
    for setting in (*map(every.__getitem__, shown), *(each for each in every.values() if each.key not in shown)):
        if sections and setting.section not in sections:
            continue
        title = _COMMON if setting.key in shown else _SECTIONS.get(setting.section, setting.section)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        action = _add_setting(groups[title], setting, with_short_name=setting.name not in taken)
        if shown and setting.key not in shown:
            hidden[action] = action.help or ""
            action.help = argparse.SUPPRESS
    if hidden:
        parser.add_argument("--help-all", action=HelpAll, hidden=hidden, help="show every setting, then exit")


def _add_setting(group: argparse._ArgumentGroup, setting: Setting, *, with_short_name: bool) -> argparse.Action:
    short = [setting.flag] if with_short_name else []
    short += _FURTHER_NAMES.get(setting.key, ())
    dashed = setting.name.replace("_", "-")
    names = list(dict.fromkeys([*short, f"--{setting.section}.{setting.name}", f"--{setting.section}.{dashed}"]))
    dest = _PREFIX + setting.key
    # argparse would expand percent signs.
    help_text = f"{setting.help} (default: {_shown(setting.default)})".replace("%", "%%")
    if setting.kind is bool:
        return group.add_argument(
            *names, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
        )
    return group.add_argument(*names, dest=dest, metavar=_metavar(setting), default=argparse.SUPPRESS, help=help_text)


def _metavar(setting: Setting) -> str:
    if typing.get_origin(setting.kind) is Literal:
        return "{" + ",".join(typing.get_args(setting.kind)) + "}"
    return {int: "N", float: "X"}.get(setting.kind, "TEXT")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value == "" else str(value)


def load_settings(args: argparse.Namespace) -> LoadedConfig:
    """Defaults, overridden by --config, by MILLRACE_ variables and by options."""
    return load_config(args.config, given_settings(args))


def given_settings(args: argparse.Namespace) -> dict[str, object]:
    """The settings among the options, by key. MODEL and --source are the same setting."""
    given = {name[len(_PREFIX) :]: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    model = getattr(args, "model", None)
    if model is not None:
        other = given.get("model.source", model)
        if other != model:
            raise UsageError(f"The model is given twice: '{model}' and '{other}'.")
        given["model.source"] = model
    return given
