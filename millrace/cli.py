"""The `millrace` command: finds the subcommand, imports only that one, and turns designed errors into one sentence.

A command is a module in `millrace/commands/` with `USAGE`, `EXAMPLES`, `add_arguments(parser)` and
`run(args) -> exit code`. Its heavy imports (torch, aiohttp, rich) stay inside `run`, so that help and error messages
are instant.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from millrace.errors import ConfigError, MillraceError
from millrace.terminal.parser import CommandParser, UsageError
from millrace.version import __version__

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a model in the terminal",
    "generate": "complete one prompt and print the text",
    "bench": "measure this machine, or any OpenAI-compatible server",
    "models": "list the models known by name, and which are here",
    "fetch": "bring a model into the cache",
    "faults": "make things go wrong on purpose and see what holds",
    "keys": "make, list and withdraw API keys",
    "config": "print every setting with its value, source and meaning",
    "ops": "print which version of each operation this machine uses",
    "version": "print the versions of Millrace and of what it stands on",
}

HELP = """\
usage: millrace COMMAND [MODEL] [options]

An LLM serving engine: fast because it is simple, readable in a weekend, nothing silent.

commands:
{commands}

examples:
  millrace serve                                  serve the default model on http://127.0.0.1:8000
  millrace serve ./my-model --port 8123           a Hugging Face directory, on another port
  millrace chat qwen2.5-coder-1.5b                chat with a model known by name
  millrace generate "The sea is" --max-tokens 32  print a completion
  millrace bench --url http://127.0.0.1:8000      measure a running server
  millrace config --port 8123                     see every setting and where it came from

`millrace COMMAND --help` explains one command. --debug shows the traceback of an error.
"""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except (UsageError, ConfigError) as error:
        return _fail(error, error.message, arguments, EXIT_USAGE)
    except MillraceError as error:
        return _fail(error, error.message, arguments, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`millrace config | head`). Python must not complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".rstrip(": ")
        return _fail(error, f"Unexpected {problem}. Run it again with --debug to see where.", arguments, EXIT_FAILED)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(top_help(), end="")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"millrace {__version__}")
        return 0
    name, rest = _split(arguments)
    if name not in COMMANDS:
        raise UsageError(f"There is no command '{name}'.{_nearest(name, COMMANDS)}")
    module = importlib.import_module(f"millrace.commands.{name}")
    return run_command(module, name, rest)


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
    return parser


def top_help() -> str:
    return HELP.format(commands="\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items()))


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The command and its own arguments; `--debug` may stand before the command too."""
    first = next((i for i, item in enumerate(arguments) if item != "--debug"), None)
    if first is None:
        raise UsageError("--debug needs a command, such as: millrace serve --debug")
    if arguments[first].startswith("-"):
        raise UsageError(f"'{arguments[first]}' stands before the command; write: millrace COMMAND {arguments[first]}")
    return arguments[first], [*arguments[:first], *arguments[first + 1 :]]


def _nearest(name: str, known: Sequence[str] | dict[str, str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else f" The commands are: {', '.join(known)}."


def _fail(error: Exception, message: str, arguments: Sequence[str], code: int) -> int:
    if wants_traceback(arguments):
        import traceback

        traceback.print_exception(error)
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}millrace: {message}{plain}", file=sys.stderr, flush=True)
    return code


def wants_traceback(arguments: Sequence[str]) -> bool:
    """Read from the raw arguments, because the error may be in parsing them."""
    if "--debug" in arguments:
        return True
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    levels = ("--log-level", "--observe.log_level", "--observe.log-level")
    return any((flag in levels and value == "debug") or flag in {f"{x}=debug" for x in levels} for flag, value in pairs)
