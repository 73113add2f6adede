"""Ollama's Modelfile: a model as another one with an adapter, a system prompt and parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from millrace.errors import ModelError

CONFIG, WEIGHTS_SUFFIX = "adapter_config.json", ".safetensors"
_KNOWN = ("FROM", "ADAPTER", "SYSTEM", "PARAMETER", "LICENSE", "TEMPLATE", "MESSAGE")
_REFUSED = {
    "TEMPLATE": "the chat template of the model is used; start its server with --chat-template for another",
    "MESSAGE": "send example messages with each request, or keep them in a session",
}
_LINE = re.compile(r"\s*(?P<word>[A-Za-z]+)[ \t]+(?P<rest>.*)")
Value = str | int | float | list[str]


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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    found, stops = Modelfile(""), []
    for number, word, value in _instructions(path, text):
        at = f"{path}, line {number}"
        if word in _REFUSED:
            raise ModelError(f"{at}: {word} is not supported: {_REFUSED[word]}.")
        if word == "FROM":
            found.source = value
        elif word == "ADAPTER":
            folder = path.parent / Path(value).expanduser()
            found.adapter = folder if folder.is_dir() else folder.parent
        elif word == "SYSTEM":
            found.system = value
        elif word == "LICENSE":
            found.licence = value if found.licence is None else f"{found.licence}\n{value}"
        else:
            name, _, given = value.partition(" ")
            given = _unquoted(given.strip())
            if name == "stop":
                stops.append(given)
            else:
                found.parameters[name] = _number(at, name, given)
    if not found.source:
        raise ModelError(f"{path} has no FROM with the name of a served model.")
    if stops:
        found.parameters["stop"] = stops
    return found


def _instructions(path: Path, text: str) -> list[tuple[int, str, str]]:
    """(line, instruction, value)"""
    found = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line, first = lines[number], number + 1
        number += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        word = match["word"].upper() if match else ""
        if match is None or word not in _KNOWN:
            raise ModelError(
                f"{path}, line {first}: {line.strip()[:80]!r} is none of {', '.join(_KNOWN)} with a value."
            )
        value = match["rest"].strip()
        opening = value.find('"""')
        if opening != -1:
            while value.count('"""') < 2:
                if number == len(lines):
                    raise ModelError(f'{path}, line {first}: its """ is not closed.')
                value += "\n" + lines[number]
                number += 1
            value = value[:opening] + value[opening:].strip().removeprefix('"""').removesuffix('"""').strip("\n")
        elif word != "PARAMETER":
            value = _unquoted(value)
        found.append((first, word, value))
    return found


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _number(at: str, name: str, text: str) -> int | float:
    try:
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        raise ModelError(f"{at}: the parameter {name!r} is {text[:80]!r}, which is no number.") from None
