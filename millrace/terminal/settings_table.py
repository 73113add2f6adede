"""Every setting with its value: as a table with sources, or as a TOML file that `--config` reads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import tomli_w

from millrace.config import LoadedConfig, Setting, all_settings

_MIN_HELP_WIDTH = 30


def table_lines(loaded: LoadedConfig, width: int | None) -> Iterator[str]:
    rows = [
        (setting.key, toml_value(_value(loaded, setting)), loaded.sources[setting.key], setting.help)
        for setting in _settings()
    ]
    header = ("key", "value", "source", "help")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(3)]
    room = None if width is None else width - sum(widths) - 6
    if width is not None and room is not None and room < _MIN_HELP_WIDTH:
        yield from _narrow_lines(rows, width)
        return
    section = ""
    for row in (header, *rows):
        if section and row[0].partition(".")[0] != section:
            yield ""
        section = row[0].partition(".")[0]
        start = "  ".join(cell.ljust(size) for cell, size in zip(row[:3], widths, strict=True))
        folded = textwrap.wrap(row[3], room) if room else [row[3]]
        yield f"{start}  {folded[0]}"
        yield from (" " * (len(start) + 2) + rest for rest in folded[1:])


def _narrow_lines(rows: list[tuple[str, str, str, str]], width: int) -> Iterator[str]:
    """For terminals without room for columns: each setting on a line, its meaning below."""
    section = ""
    for key, value, source, text in rows:
        if section and key.partition(".")[0] != section:
            yield ""
        section = key.partition(".")[0]
        yield from textwrap.wrap(f"{key} = {value}  ({source})", width, subsequent_indent="    ")
        yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def toml_lines(loaded: LoadedConfig) -> Iterator[str]:
    section = ""
    for setting in _settings():
        if setting.section != section:
            yield from ([""] if section else [])
            yield f"[{setting.section}]"
            section = setting.section
        yield f"{setting.name} = {toml_value(_value(loaded, setting))}  # {setting.help}"


def records(loaded: LoadedConfig) -> dict[str, dict[str, object]]:
    """Value, source and meaning of every setting, by its key."""
    return {
        setting.key: {
            "value": _value(loaded, setting),
            "source": loaded.sources[setting.key],
            "help": setting.help,
            "option": setting.flag,
            "variable": setting.variable,
        }
        for setting in _settings()
    }


def toml_value(value: object) -> str:
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _settings() -> list[Setting]:
    return list(all_settings().values())


def _value(loaded: LoadedConfig, setting: Setting) -> object:
    return getattr(getattr(loaded.config, setting.section), setting.name)
