"""The settings tree on the command line: every leaf of `config` is an option, by its short and by its dotted name."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from typing import Literal

from millrace.config import DEFAULT_MODEL, Leaf, LoadedConfig, leaves, load_config
from millrace.terminal.parser import UsageError

_PREFIX = "setting:"
_SECTIONS = {
    "model": "the model",
    "server": "the server",
    "plan": "planning steps",
    "memory": "memory",
    "run": "running steps",
    "observe": "watching it",
}


def add_model(parser: argparse.ArgumentParser) -> None:
    text = "a known name, a directory, a .gguf file, a hub id, or random:<config.json>"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{text} (default: {DEFAULT_MODEL})")


def add_settings(
    parser: argparse.ArgumentParser, *, sections: tuple[str, ...] = (), taken: tuple[str, ...] = ()
) -> None:
    """--config and an option per setting; only those of `sections` when some are named.

    A name in `taken` already means something else to this command, and keeps only its dotted spelling.
    """
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file of settings; options override it")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves().values():
        if sections and leaf.section not in sections:
            continue
        if leaf.section not in groups:
            groups[leaf.section] = parser.add_argument_group(_SECTIONS.get(leaf.section, leaf.section))
        _add_leaf(groups[leaf.section], leaf, with_short_name=leaf.name not in taken)


def _add_leaf(group: argparse._ArgumentGroup, leaf: Leaf, *, with_short_name: bool) -> None:
    short = [leaf.flag] if with_short_name else []
    if leaf.key == "model.source":
        short.append("--model")
    dashed = leaf.name.replace("_", "-")
    names = list(dict.fromkeys([*short, f"--{leaf.section}.{leaf.name}", f"--{leaf.section}.{dashed}"]))
    dest = _PREFIX + leaf.key
    # Percent signs would be read as argparse's own format directives.
    help_text = f"{leaf.help} (default: {_shown(leaf.default)})".replace("%", "%%")
    if leaf.kind is bool:
        group.add_argument(
            *names, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
        )
    else:
        group.add_argument(*names, dest=dest, metavar=_metavar(leaf), default=argparse.SUPPRESS, help=help_text)


def _metavar(leaf: Leaf) -> str:
    if typing.get_origin(leaf.kind) is Literal:
        return "{" + ",".join(typing.get_args(leaf.kind)) + "}"
    return {int: "N", float: "X"}.get(leaf.kind, "TEXT")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value == "" else str(value)


def load_settings(args: argparse.Namespace) -> LoadedConfig:
    """Defaults, then --config, then what the command line says. MODEL and --source are the same setting."""
    given = {name[len(_PREFIX) :]: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    model = getattr(args, "model", None)
    if model is not None:
        other = given.get("model.source", model)
        if other != model:
            raise UsageError(f"The model is given twice, as '{model}' and as '{other}'; give it once.")
        given["model.source"] = model
    return load_config(args.config, given)
