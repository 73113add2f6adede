"""argparse with one-sentence errors that name the nearest valid option, and help that fits a screen."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from millrace.errors import ConfigError
from millrace.terminal.folding import folded
from millrace.terminal.foreign_names import ADVICE, translated

CLOSE = 0.75
"""Least similarity of a name that is suggested, from 0 to 1; that of `--prot` and `--port` is 0.75."""


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
        raise UsageError(f"{_sentence(message)} {self._see_help()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # Help into a closed pipe fails here, where that is handled.
        super().exit(status, message)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        own, after_dashes = self._split(arguments)
        # Intermixed: else MODEL, if it comes first, also decides that an optional PROMPT after the options is missing.
        parsed, unknown = self.parse_known_intermixed_args(translated(own, set(self._option_string_actions)))
        if unknown:
            raise UsageError(self._explain_unknown(unknown[0]))
        if self.get_default("after_dashes") is not None:
            parsed.after_dashes = after_dashes
        return parsed

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Arguments before and after `--`, for a command that passes the latter on; other commands get all of them."""
        own = list(arguments)
        if self.get_default("after_dashes") is None or "--" not in own:
            return own, []
        at = own.index("--")
        return own[:at], own[at + 1 :]

    def _explain_unknown(self, item: str) -> str:
        if item.startswith(("http://", "https://")) and "--url" in self._option_string_actions:
            return f"Unexpected argument '{item}'. Did you mean '--url {item}'?"
        if not item.startswith("-"):
            hint = "Quote the prompt." if "PROMPT" in (self.usage or "") else self._see_help()
            return f"Unexpected argument '{item}'. {hint}"
        flag = item.partition("=")[0]
        if flag in self._option_string_actions:
            return f"{flag} takes no value. {self._see_help()}"
        advice = ADVICE.get(flag.replace("_", "-"))
        if advice is not None:
            return f"There is no option '{flag}' here. {advice}"
        close = nearest_flag(flag, self._option_string_actions)
        hint = f"Did you mean '{close}'?" if close else f"`{self.prog} {self._every_option()}` lists the options."
        return f"Unknown option '{flag}'. {hint}"

    def _every_option(self) -> str:
        return "--help-all" if "--help-all" in self._option_string_actions else "--help"

    def _see_help(self) -> str:
        return f"See `{self.prog} --help`."


def nearest_flag(flag: str, known: Iterable[str]) -> str | None:
    """The known option closest to `flag`, if it could be a slip; a short name wins over a dotted one."""
    options = {name.lstrip("-"): name for name in known}
    normal = flag.lower().replace("_", "-").lstrip("-")
    if normal in options:
        return options[normal]
    pools = (list(options),) if "." in flag else ([name for name in options if "." not in name], list(options))
    for pool in pools:
        close = difflib.get_close_matches(normal, pool, n=1, cutoff=CLOSE)
        if close:
            return options[close[0]]
    return None


def _sentence(message: str) -> str:
    """argparse's messages as sentences: "argument --port: expected one argument" becomes "--port needs a value."."""
    match = re.fullmatch(r"argument ([^:]+): (.*)", message, flags=re.DOTALL)
    if match is None:
        missing = re.fullmatch(r"the following arguments are required: (.*)", message)
        if missing:
            return f"Missing argument{'s' if ',' in missing[1] else ''}: {missing[1]}."
        return message[0].upper() + message[1:].rstrip(".") + "."
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
    """Shows the short names of settings and hides the dotted ones."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 110)
        super().__init__(prog, max_help_position=30, width=width)

    def _format_usage(self, usage: str | None, *rest: Any) -> str:
        return textwrap.fill(super()._format_usage(usage, *rest), self._width, subsequent_indent=" " * 7) + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return folded(super()._fill_text(text, width, indent), width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [name for name in action.option_strings if "." not in name] or action.option_strings[:1]
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"{shown[0]}, --no-…"
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(shown) + value


class HelpAll(argparse.Action):
    """`--help-all`: help that includes the options in `hidden`, which maps each to its help text."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, hidden: Mapping[argparse.Action, str], help: str
    ) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)
        self._hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        for action, text in self._hidden.items():
            action.help = text
        parser.print_help()
        parser.exit()


def numbers(option: str, text: str, *, least: int = 1) -> list[int]:
    """Parse whole numbers separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        kind = "positive whole numbers" if least else "whole numbers from 0"
        raise UsageError(f"{option} is '{text}'; it must be {kind} separated by commas.")
    return found
