"""Prompts for training, from a file, and which of them are held out for measuring."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError

HELD_OUT_SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 0.05, 2, 64
"""Share of each workload's prompts that is kept for measuring, and its bounds."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    messages: tuple[tuple[str, str], ...]
    """(role, content); empty for plain text."""
    text: str = ""
    workload: str = "chat"
    is_held_out: bool = False


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """One prompt per line. A JSON line has `messages` (or `conversations`), or `prompt`, `instruction`, `question`,
    `turns` or `text`, and may name its `workload`. In other files a line is one user message."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path} cannot be read: {error}. Give a text or JSONL file.", param="data") from error
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    found = [
        _from_json(path, number, line) if is_json else TrainingPrompt((("user", line),))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"--data {path} holds no prompts. Give a file with one prompt per line.", param="data")
    return found


def _from_json(path: Path, number: int, line: str) -> TrainingPrompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number} is no JSON: {error}.", param="data") from error
    if isinstance(value, str):
        return TrainingPrompt((("user", value),))
    if not isinstance(value, dict):
        raise _unknown(path, number)
    workload = value.get("workload") or value.get("category") or "chat"
    messages = value.get("messages") or value.get("conversations")
    if isinstance(messages, list):
        return TrainingPrompt(_messages(path, number, messages), workload=str(workload))
    if isinstance(value.get("text"), str):
        return TrainingPrompt((), value["text"], str(workload))
    for key in ("prompt", "instruction", "question"):
        if isinstance(value.get(key), str):
            extra = value.get("input") if key == "instruction" else None
            content = f"{value[key]}\n\n{extra}" if isinstance(extra, str) and extra else value[key]
            return TrainingPrompt((("user", content),), workload=str(workload))
    turns = value.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return TrainingPrompt((("user", turns[0]),), workload=str(workload))
    raise _unknown(path, number)


_ROLES = {"human": "user", "gpt": "assistant"}


def _messages(path: Path, number: int, items: list[Any]) -> tuple[tuple[str, str], ...]:
    """The conversation up to its last user message: the target writes the answer itself."""
    pairs = []
    for item in items:
        role = item.get("role") or item.get("from") if isinstance(item, dict) else None
        content = item.get("content") or item.get("value") if isinstance(item, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise _unknown(path, number)
        pairs.append((_ROLES.get(role, role), content))
    while pairs and pairs[-1][0] != "user":
        pairs.pop()
    if not pairs:
        raise ConfigError(f"{path}, line {number}: the conversation has no user message.", param="data")
    return tuple(pairs)


def _unknown(path: Path, number: int) -> ConfigError:
    return ConfigError(
        f"{path}, line {number} is no prompt: it needs messages, prompt, instruction, question, turns or text.",
        param="data",
    )


def hold_out(prompts: Sequence[TrainingPrompt], seed: int) -> list[TrainingPrompt]:
    """Shuffle, and mark a share of each workload as held out. One prompt is never on both sides."""
    unique = list(dict.fromkeys(prompts))
    random.Random(seed).shuffle(unique)
    marked: list[TrainingPrompt] = []
    for workload in dict.fromkeys(prompt.workload for prompt in unique):
        own = [prompt for prompt in unique if prompt.workload == workload]
        count = min(MAX_HELD_OUT, max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(own))), len(own) // 2)
        for index, prompt in enumerate(own):
            marked.append(TrainingPrompt(prompt.messages, prompt.text, workload, index < count))
    if not any(prompt.is_held_out for prompt in marked):
        raise ConfigError(
            f"{len(marked)} prompts are too few: some are held out for measuring. Give at least two of a workload.",
            param="data",
        )
    random.Random(seed + 1).shuffle(marked)
    return marked
