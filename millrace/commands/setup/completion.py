"""`millrace completion SHELL`: prints a script that completes commands, options and model names."""

from __future__ import annotations

import argparse
import shlex

from millrace.sources.catalogue import entries
from millrace.sources.known_models import KNOWN_MODELS

USAGE = "millrace completion {bash,zsh,fish}"
EXAMPLES = """\
examples:
  source <(millrace completion bash)                    in ~/.bashrc
  source <(millrace completion zsh)                     in ~/.zshrc, after compinit
  millrace completion fish > ~/.config/fish/completions/millrace.fish"""

_WITH_MODEL = ("run", "serve", "chat", "pull", "show", "rm", "doctor", "config")

_BASH = """\
_millrace() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} options="" models=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {commands} -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
        *) COMPREPLY=($(compgen -W "$models" -- "$word") $(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _millrace millrace
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    parsers: dict[str, argparse.ArgumentParser] = args.command_parsers()
    names = _model_names()
    if args.shell == "fish":
        print("\n".join(_fish(parsers, names)))
        return 0
    cases = []
    for command, parser in parsers.items():
        models = f" models={shlex.quote(' '.join(names))}" if command in _WITH_MODEL else ""
        cases.append(f"        {command}) options={shlex.quote(' '.join(_options(parser)))}{models} ;;")
    script = _BASH.format(commands=shlex.quote(" ".join(parsers)), cases="\n".join(cases))
    print((_ZSH if args.shell == "zsh" else "") + script, end="")
    return 0


def _fish(parsers: dict[str, argparse.ArgumentParser], names: list[str]) -> list[str]:
    lines = ["complete -c millrace -f"]
    for command, parser in parsers.items():
        summary = shlex.quote(parser.description or "")
        lines.append(f"complete -c millrace -n __fish_use_subcommand -a {command} -d {summary}")
        used = f"-n '__fish_seen_subcommand_from {command}'"
        lines += [f"complete -c millrace {used} -l {flag.removeprefix('--')}" for flag in _options(parser)]
        if command in _WITH_MODEL:
            lines.append(f"complete -c millrace {used} -F -a {shlex.quote(' '.join(names))}")
    return lines


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The long options, without the dotted names of settings."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    return sorted(flag for flag in flags if flag.startswith("--") and "." not in flag)


def _model_names() -> list[str]:
    return [*(model.name for model in KNOWN_MODELS), *(entry.name for entry in entries() if entry.is_supported)]
