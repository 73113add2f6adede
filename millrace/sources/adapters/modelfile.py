"""Ollama's Modelfile: a model as another one with an adapter, a system prompt and parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millrace.errors import ModelError

CONFIG, WEIGHTS_SUFFIX = "adapter_config.json", ".safetensors"
_KNOWN = ("FROM", "ADAPTER", "SYSTEM", "PARAMETER", "LICENSE", "TEMPLATE", "MESSAGE")
_REFUSED = {
    "TEMPLATE": "the chat template of the model is used; start its server with --chat-template for another",
    "MESSAGE": "send example messages with each request, or keep them in a session",
}
_ONCE = ("FROM", "ADAPTER", "SYSTEM")
_QUOTES = ('"""', '"')
_SWITCHES = {"true": True, "false": False}
_LINE = re.compile(r"\s*(?P<word>[A-Za-z]+)[ \t]+(?P<rest>.*)")
Value = int | float | bool | list[str]


@dataclass(slots=True)
class Modelfile:
    source: str
    """FROM"""
    adapter: Path | None = None
    """Its directory."""
    system: str | None = None
    licence: str | None = None
    parameters: dict[str, Value] = field(default_factory=dict)

    def adapter_files(self) -> list[Path]:
        """The two files of the adapter, as PEFT saves them."""
        if self.adapter is None:
            return []
        weights = sorted(self.adapter.glob(f"*{WEIGHTS_SUFFIX}"))
        config = self.adapter / CONFIG
        if len(weights) != 1 or not config.is_file():
            raise ModelError(
                f"ADAPTER {self.adapter}: there must be an {CONFIG} and one {WEIGHTS_SUFFIX} file, as PEFT saves them."
                " GGUF adapters and pickles are not read."
            )
        return [config, weights[0]]


def read_modelfile(path: Path) -> Modelfile:
    """Raises ModelError with the line. Paths in it are relative to its directory."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    found, stops, seen = Modelfile(""), [], set()
    for at, word, name, value in _instructions(path, text):
        if word in _REFUSED:
            raise ModelError(f"{at}: {word} is not supported: {_REFUSED[word]}.")
        if word in _ONCE and word in seen:
            raise ModelError(f"{at}: this is a second {word}. Keep one.")
        seen.add(word)
        if word == "FROM":
            found.source = value
        elif word == "ADAPTER":
            folder = path.parent / Path(value).expanduser()
            found.adapter = folder if folder.is_dir() else folder.parent
        elif word == "SYSTEM":
            found.system = value
        elif word == "LICENSE":
            found.licence = value if found.licence is None else f"{found.licence}\n{value}"
        elif name == "stop":
            stops.append(value)
        else:
            found.parameters[name] = _number_or_switch(at, name, value)
    if not found.source:
        raise ModelError(f"{path} has no FROM with the name of a served model.")
    if stops:
        found.parameters["stop"] = stops
    return found


def _instructions(path: Path, text: str) -> Iterator[tuple[str, str, str, str]]:
    """(where it is, instruction, name of the parameter, value)"""
    lines = iter(enumerate(text.split("\n"), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        at, match = f"{path}, line {number}", _LINE.fullmatch(line)
        word = match["word"].upper() if match else ""
        if match is None or word not in _KNOWN:
            raise ModelError(f"{at}: {line.strip()[:80]!r} is none of {', '.join(_KNOWN)} with a value.")
        name, rest = "", match["rest"]
        if word == "PARAMETER":
            name, rest = (*rest.split(None, 1), "")[:2]
        yield at, word, name, _value(at, rest, lines)


def _value(at: str, rest: str, lines: Iterator[tuple[int, str]]) -> str:
    """Text in quotes ends at quotes that end a line, which may be a later one; quotes within it are text."""
    quotes = next((each for each in _QUOTES if rest.startswith(each)), "")
    if not quotes:
        return rest.strip()
    value = rest.removeprefix(quotes)
    while not value.rstrip().endswith(quotes):
        if quotes in value:
            after = value[value.rindex(quotes) + len(quotes) :].strip()
            raise ModelError(
                f"{at}: there is text after the closing {quotes}: {after[:80]!r}. Put it inside the quotes."
            )
        following = next(lines, None)
        if following is None:
            raise ModelError(f"{at}: its {quotes} is not closed.")
        value += "\n" + following[1]
    return value.rstrip().removesuffix(quotes)


def _number_or_switch(at: str, name: str, text: str) -> int | float | bool:
    if text in _SWITCHES:
        return _SWITCHES[text]
    try:
        value = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ModelError(
            f"{at}: the parameter {name!r} is {text[:80]!r}, which is no number and neither true nor false."
        )
    return value
