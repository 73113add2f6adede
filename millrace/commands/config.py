"""`millrace config`: every setting with its value and where the value came from, as a table or as TOML."""

from __future__ import annotations

import argparse
import json

from millrace.config import Config
from millrace.params.defaults import NEUTRAL_DEFAULTS, SamplingDefaults
from millrace.params.sampling import SamplingParams
from millrace.sources.known_models import find_known
from millrace.sources.sampling_defaults import from_tables, sampling_defaults
from millrace.terminal.folding import folded, terminal_width
from millrace.terminal.model_download import is_downloaded
from millrace.terminal.settings_options import add_model, add_settings, load_settings
from millrace.terminal.settings_table import records, table_lines, toml_lines

USAGE = "millrace config [MODEL] [options] [--toml | --json]"
EXAMPLES = """\
examples:
  millrace config                                 every setting at its default
  millrace config --config my.toml --port 9000    a file, overridden by an option
  millrace config --toml > my.toml                a file to start from"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: value, source and help by key")
    parser.add_argument("--toml", action="store_true", help="print a TOML file that --config accepts")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    loaded = load_settings(args)
    if args.json:
        print(json.dumps(records(loaded)))
        return 0
    lines = toml_lines(loaded) if args.toml else table_lines(loaded, terminal_width())
    print("\n".join(lines))
    if not args.toml:
        print(folded(f"\n{sampling_line(loaded.config)}"))
    return 0


def sampling_line(config: Config) -> str:
    """What a request samples with that sets nothing, if the model is on this machine."""
    found = _sampling_defaults(config)
    if found is None:
        return f"Sampling of requests that set none: known once {config.model.source} is downloaded."
    neutral = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: found.fields().get(name, getattr(neutral, name)) for name in names}
    shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
    return f"Sampling of requests that set none ({found.source}): {shown}"


def _sampling_defaults(config: Config) -> SamplingDefaults | None:
    """None: the model's files are not on this machine. Files of a known model are fixed and need not be read."""
    source, choice = config.model.source, config.model.generation_defaults
    if choice == "neutral":
        return NEUTRAL_DEFAULTS
    if find_known(source) is not None:
        return from_tables(source)
    if not is_downloaded(source):
        return None
    from millrace.sources.resolve import resolve_model

    return sampling_defaults(resolve_model(source), choice)
