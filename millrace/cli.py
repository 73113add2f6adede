"""The `millrace` command: imports only the module of the subcommand, and prints expected errors as one sentence.

`millrace/commands/__init__.py` describes what a command module contains.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

from millrace.errors import ConfigError, MillraceError
from millrace.terminal.colour import RED, coloured
from millrace.terminal.folding import folded
from millrace.terminal.foreign_names import COMMANDS as SYNONYMS
from millrace.terminal.parser import CommandParser, UsageError
from millrace.version import __version__

COMMANDS = {
    "run": "download a model if needed, and chat with it",
    "serve": "serve a model over HTTP",
    "gateway": "one address in front of many replicas: routing, retries, streams that survive a replica",
    "launch": "start a coding agent (Claude Code, Codex, Qwen Code, opencode) on a model of yours",
    "chat": "chat with a model in the terminal, or with a server",
    "generate": "complete one prompt and print the text",
    "train-drafter": "train a drafter for speculative decoding from a model's own answers",
    "train-adapter": "train a LoRA adapter of a model from examples, as PEFT writes it",
    "merge": "add a LoRA adapter to its model's weights and write the result",
    "canary": "give a share of an adapter's requests to a new version, promote it or take it back",
    "create": "make a model of a served one: an adapter, a system prompt, parameters (Ollama's Modelfile)",
    "bench": "measure this machine, or any OpenAI-compatible server",
    "load": "send a workload to a server: latencies, goodput, the highest rate that meets objectives",
    "simulate": "run a trace through the engine's scheduler with step times instead of a device",
    "calibrate": "measure a model's steps on this machine, for simulations",
    "capacity": "find the cheapest machines that meet objectives, by simulation",
    "tune": "search settings for a workload, by simulation",
    "study": "answer a question about serving by simulation, with a table and a plot",
    "replay": "explain a step log: timeline, late requests, the same under other settings",
    "top": "watch a running server: rates, latencies, queue, KV memory",
    "trace": "draw where the time of a request or of the engine's steps went",
    "explain": "say in sentences why a request took as long as it did",
    "profile": "measure a server's steps: where their time goes, and a roofline",
    "cost": "dollars per million tokens, the largest items, bills",
    "slo": "show objectives and budgets; write alert rules and a Grafana dashboard",
    "models": "list the models known by name, with sizes",
    "pull": "download a model",
    "ls": "list the downloaded models",
    "show": "print what a model is and what it needs",
    "kv": "compute the KV cache of a model: bytes per token and request, and what fits where",
    "cache": "keep prompts cached on a running server: list, show, warm, remove, export, import",
    "sessions": "conversations that a running server keeps: make, list, show, fork, renew, remove, export, import",
    "rm": "delete a downloaded model",
    "alias": "give a model a short name of your own",
    "ps": "list the running servers on this machine",
    "stop": "stop a running server",
    "reload": "make a running server read its settings again, with a preview",
    "up": "start the replicas and the gateway of a fleet's file, watch them and restart them",
    "status": "say how the members of a running fleet are",
    "restart": "restart a fleet's replicas one after the other, without losing a stream",
    "down": "end a running fleet gracefully",
    "postmortem": "write the timeline of an incident from events, logs, decisions and traces",
    "router": "train and evaluate the choice between a small and a large model",
    "faults": "inject faults into a server and check how it behaves",
    "keys": "create, list and revoke API keys",
    "config": "print every setting with its value, source and meaning",
    "ops": "print which version of each operation this machine uses",
    "doctor": "check this machine and a model: what is wrong, why, and the fix",
    "completion": "print a script for completion in bash, zsh or fish",
    "version": "print the versions of Millrace and its dependencies",
}

_UNTIL_CTRL_C = frozenset({"chat", "gateway", "run", "serve", "top"})
"""Commands that SIGINT stops, even if they were started with it ignored, as the background jobs of a script are."""

_FIGURES = frozenset({"cost", "explain", "load", "profile", "slo", "top", "trace"})
_PLANNING = frozenset({"calibrate", "capacity", "replay", "simulate", "study", "tune"})
"""Commands whose modules are in `millrace/commands/planning`."""

_LIBRARY = ("models", "pull", "ls", "show", "kv", "cache", "sessions", "rm", "alias", "ps", "stop", "reload")
"""Commands whose modules are in `millrace/commands/library`."""

_FLEET = ("gateway", "up", "status", "restart", "down", "router", "postmortem")
"""Commands whose modules are in `millrace/commands/fleet`."""

_TRAINING = ("train-adapter", "train-drafter")
"""Commands whose modules are in `millrace/commands/training`."""

_ADAPTERS = ("merge", "create", "canary")
"""Commands whose modules are in `millrace/commands/adapters`."""

_SETUP = ("doctor", "completion")
"""Commands whose modules are in `millrace/commands/setup`."""

HELP = """\
usage: millrace COMMAND [MODEL] [options]

Millrace is an LLM serving engine.

commands:
{commands}

examples:
  millrace serve                                  serve the default model on http://127.0.0.1:8000
  millrace serve ./my-model --port 8123           serve a Hugging Face directory on another port
  millrace run llama3.2-1b                        download a model by name and chat with it
  millrace launch claude                          Claude Code with a model on this machine
  millrace generate "The sea is" --max-tokens 32  print a completion
  millrace bench --url http://127.0.0.1:8000      measure a running server
  millrace config --port 8123                     show every setting and where its value came from

`millrace help COMMAND` shows the options of a command. --debug shows the traceback of an error.
exit codes: 0 done, 1 failed, 2 wrong use or setting, 130 interrupted, 141 output closed (as in `millrace ls | head -1`)
"""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # Here, where a closed pipe is handled.
        return code
    except (UsageError, ConfigError) as error:
        return _fail(error, error.message, arguments, EXIT_USAGE)
    except MillraceError as error:
        return _fail(error, error.message, arguments, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`millrace config | head`). Keep Python from failing again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".rstrip(": ")
        return _fail(error, f"Unexpected {problem}. Run again with --debug for a traceback.", arguments, EXIT_FAILED)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(folded(top_help()), end="")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"millrace {__version__}")
        return 0
    name, rest = _split(arguments)
    name = name if name in COMMANDS else SYNONYMS.get(name, name)
    if name not in COMMANDS:
        raise UsageError(f"Unknown command '{name}'.{_nearest(name, COMMANDS)}")
    if name in _UNTIL_CTRL_C:
        _take_interrupts()
    module = importlib.import_module(module_of(name))
    return run_command(module, name, rest)


def _take_interrupts() -> None:
    """Raise KeyboardInterrupt on SIGINT. Python leaves a signal alone that was ignored when it started."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def module_of(name: str) -> str:
    """Full name of the module of a command."""
    rooms = {
        "library.": _LIBRARY,
        "setup.": _SETUP,
        "figures.": _FIGURES,
        "planning.": _PLANNING,
        "fleet.": _FLEET,
        "adapters.": _ADAPTERS,
        "training.": _TRAINING,
    }
    room = next((room for room, names in rooms.items() if name in names), "")
    return f"millrace.commands.{room}{name.replace('-', '_')}"


def run_command(module: ModuleType, name: str, arguments: Sequence[str]) -> int:
    parser = command_parser(module, name)
    code = module.run(parser.parse(arguments))
    assert isinstance(code, int)
    return code


def command_parser(module: ModuleType, name: str) -> CommandParser:
    parser = CommandParser(
        prog=f"millrace {name}",
        usage=module.USAGE,
        description=COMMANDS[name][0].upper() + COMMANDS[name][1:] + ".",
        epilog=module.EXAMPLES,
    )
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command_parsers=command_parsers)
    return parser


def command_parsers() -> dict[str, CommandParser]:
    """The parser of every command, for the completion of shells."""
    return {name: command_parser(importlib.import_module(module_of(name)), name) for name in COMMANDS}


def top_help() -> str:
    return HELP.format(commands="\n".join(f"  {name:<14} {summary}" for name, summary in COMMANDS.items()))


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The command and its arguments; `--debug` may also come before the command."""
    first = next((i for i, item in enumerate(arguments) if item != "--debug"), None)
    if first is None:
        raise UsageError("--debug needs a command, for example: millrace serve --debug")
    if arguments[first].startswith("-"):
        raise UsageError(f"Options come after the command: millrace COMMAND {arguments[first]}")
    return arguments[first], [*arguments[:first], *arguments[first + 1 :]]


def _nearest(name: str, known: Sequence[str] | dict[str, str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else f" Commands: {', '.join(known)}."


def _fail(error: Exception, message: str, arguments: Sequence[str], code: int) -> int:
    if wants_traceback(arguments):
        import traceback

        traceback.print_exception(error)
    print(coloured(f"millrace: {message}", RED, sys.stderr), file=sys.stderr, flush=True)
    return code


def wants_traceback(arguments: Sequence[str]) -> bool:
    """Looks at the raw arguments, because parsing them may be what failed."""
    if "--debug" in arguments:
        return True
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    levels = ("--log-level", "--observe.log_level", "--observe.log-level")
    return any((flag in levels and value == "debug") or flag in {f"{x}=debug" for x in levels} for flag, value in pairs)
