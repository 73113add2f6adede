"""Where requests come from: traces with timestamps (Azure's CSV, Mooncake's JSON lines) and data sets of prompts."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError

_PROMPT_FIELDS = ("prompt", "question", "instruction", "text", "input", "problem")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    at_s: float
    """Seconds after the first request of the trace."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its 512-token prefix blocks: equal ids are equal text."""


def read_trace(path: Path) -> list[TracedRequest]:
    """In order of time."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.", param="trace") from error
    try:
        found = _json_trace(text) if text.lstrip().startswith("{") else _csv_trace(text)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The trace {path} has a line that cannot be understood ({error}). It must be a CSV with TIMESTAMP,"
            " ContextTokens and GeneratedTokens, or JSON lines with timestamp (ms), input_length and output_length.",
            param="trace",
        ) from error
    if not found:
        raise ConfigError(f"The trace {path} has no requests.", param="trace")
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s
    return [TracedRequest(one.at_s - first, one.prompt_tokens, one.output_tokens, one.blocks) for one in found]


def _json_trace(text: str) -> list[TracedRequest]:
    found = []
    for line in text.splitlines():
        if line.strip():
            record = json.loads(line)
            blocks = tuple(int(block) for block in record.get("hash_ids", ()))
            lengths = max(1, int(record["input_length"])), max(1, int(record["output_length"]))
            found.append(TracedRequest(float(record["timestamp"]) / 1e3, *lengths, blocks))
    return found


def _csv_trace(text: str) -> list[TracedRequest]:
    found = []
    for row in csv.DictReader(text.splitlines()):
        stamp = row["TIMESTAMP"]
        try:
            at_s = float(stamp)
        except ValueError:
            at_s = datetime.fromisoformat(stamp).timestamp()
        lengths = max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))
        found.append(TracedRequest(at_s, *lengths))
    return found


@dataclass(frozen=True, slots=True)
class Conversation:
    """User turns of one conversation; usually one."""

    turns: tuple[str, ...]
    schema: dict[str, Any] | None = None


def read_dataset(path: Path) -> list[Conversation]:
    """JSON lines or a JSON array: a prompt, messages, or a ShareGPT conversation per record."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_array = text.lstrip().startswith("[")
        records = json.loads(text) if is_array else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"The data set {path} cannot be read: {error}.", param="dataset") from error
    found = [conversation for record in records if (conversation := _conversation(record)) is not None]
    if not found:
        raise ConfigError(
            f"The data set {path} has no prompts. Each record needs one of {', '.join(_PROMPT_FIELDS)}, messages or"
            " conversations.",
            param="dataset",
        )
    return found


def _conversation(record: Any) -> Conversation | None:
    if isinstance(record, str):
        return Conversation((record,)) if record else None
    if not isinstance(record, dict):
        return None
    schema = record.get("json_schema") if isinstance(record.get("json_schema"), dict) else None
    turns = record.get("messages") or record.get("conversations")
    if isinstance(turns, list):
        users = [_text_of(turn) for turn in turns if isinstance(turn, dict) and _role_of(turn) in ("user", "human")]
        texts = tuple(text for text in users if text)
        return Conversation(texts, schema) if texts else None
    for name in _PROMPT_FIELDS:
        if isinstance(record.get(name), str) and record[name]:
            return Conversation((record[name],), schema)
    return None


def _role_of(turn: dict[str, Any]) -> str:
    return str(turn.get("role") or turn.get("from") or "")


def _text_of(turn: dict[str, Any]) -> str:
    text = turn.get("content") or turn.get("value") or ""
    return text if isinstance(text, str) else ""


def read_schemas(path: Path) -> list[dict[str, Any]]:
    """JSON schemas: one file, or all .json files of a directory. A file may hold the schema under `schema`."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"The schema {file} cannot be read: {error}.", param="schemas") from error
        if isinstance(record, dict):
            inner = record.get("schema")
            found.append(inner if isinstance(inner, dict) else record)
    if not found:
        raise ConfigError(f"{path} holds no JSON schemas.", param="schemas")
    return found
