"""argparse with manners: one-sentence errors that name the nearest valid option, and help that fits a screen."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import NoReturn

from millrace.errors import ConfigError


class UsageError(ConfigError):
    """The command line cannot be understood."""


class CommandParser(argparse.ArgumentParser):
    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_sentence(message)} `{self.prog} --help` shows how it is used.")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            raise UsageError(self._explain_unknown(unknown[0]))
        return parsed

    def _explain_unknown(self, item: str) -> str:
        if not item.startswith("-"):
            return f"'{item}' is one argument too many. `{self.prog} --help` shows how it is used."
        flag = item.partition("=")[0]
        if flag in self._option_string_actions:
            return f"{flag} takes no value. `{self.prog} --help` shows how it is used."
        close = nearest_flag(flag, self._option_string_actions)
        hint = f"Did you mean '{close}'?" if close else f"`{self.prog} --help` lists them all."
        return f"There is no option '{flag}'. {hint}"


def nearest_flag(flag: str, known: Iterable[str]) -> str | None:
    """The known option closest to `flag`, preferring the short spelling when a dotted one is no closer."""
    options = list(known)
    normal = flag.lower().replace("_", "-")
    if normal in options:
        return normal
    pools = (options,) if "." in flag else ([name for name in options if "." not in name], options)
    for pool in pools:
        close = difflib.get_close_matches(normal, pool, n=1, cutoff=0.6)
        if close:
            return close[0]
    return None


def _sentence(message: str) -> str:
    """argparse's phrases as sentences: "argument --port: expected one argument" becomes "--port needs a value."."""
    match = re.fullmatch(r"argument ([^:]+): (.*)", message, flags=re.DOTALL)
    if match is None:
        missing = re.fullmatch(r"the following arguments are required: (.*)", message)
        return f"{missing[1]} is missing." if missing else message[0].upper() + message[1:].rstrip(".") + "."
    options = match[1].split("/")
    name, problem = next((x for x in options if "." not in x), options[0]), match[2]
    if problem.startswith("expected one argument"):
        return f"{name} needs a value."
    if problem.startswith("ignored explicit argument"):
        return f"{name} takes no value."
    bad_value = re.fullmatch(r"invalid (\w+) value: (.*)", problem)
    if bad_value:
        wanted = {"int": "a whole number", "float": "a number"}.get(bad_value[1], f"a {bad_value[1]}")
        return f"{name} is {bad_value[2]}; it must be {wanted}."
    return f"{name}: {problem.rstrip('.')}."


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Hides the dotted spellings of settings, which are there for exactness, not for reading."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 110)
        super().__init__(prog, max_help_position=30, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [name for name in action.option_strings if "." not in name] or action.option_strings[:1]
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"{shown[0]}, --no-…"
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(shown) + value


def numbers(option: str, text: str) -> list[int]:
    """Positive whole numbers, separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{option} is '{text}'; give positive numbers, separated by commas.")
    return found
