"""Examples to learn from: each is a prompt and its answer, as token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.text.chat.template import ChatTemplate
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.training.answers import Answer

_PROMPTS, _ANSWERS = ("prompt", "instruction", "question"), ("completion", "response", "answer", "output")
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 64


def read_examples(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate, *, max_tokens: int, seed: int
) -> tuple[list[Answer], int]:
    """(examples, how many were left out because they are longer). A share of them is held out for measuring.

    A line of the file is a JSON object: `messages` whose last is the assistant's; or a prompt (`prompt`, `instruction`
    with `input`, `question`) and its answer (`completion`, `response`, `answer`, `output`); or `text`, all of which is
    learned.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give a file with one JSON object per line.") from error
    found = [
        _encoded(_parsed(path, number, line), tokenizer, template)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    short = [one for one in found if len(one.token_ids) <= max_tokens]
    if len(short) < 2:
        raise ConfigError(
            f"{path} has {len(short)} examples of at most {max_tokens} tokens; one is held out, so give two or more."
        )
    random.Random(seed).shuffle(short)
    count = min(MAX_HELD_OUT, max(1, round(HELD_OUT_SHARE * len(short))))
    return [replace(one, is_held_out=index < count) for index, one in enumerate(short)], len(found) - len(short)


def _parsed(path: Path, number: int, line: str) -> list[dict[str, Any]] | str:
    """Messages, or a plain text."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number} is no JSON: {error}.") from error
    if isinstance(value, dict):
        messages = value.get("messages")
        if isinstance(messages, list) and all(map(_is_message, messages)):
            if len(messages) > 1 and messages[-1]["role"] == "assistant":
                return messages
            raise ConfigError(f"{path}, line {number}: the last of its messages must be the assistant's.")
        pair = _pair(value)
        if pair is not None:
            return [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        if isinstance(value.get("text"), str) and value["text"]:
            text: str = value["text"]
            return text
    raise ConfigError(
        f"{path}, line {number} is no example: it needs messages, or one of {', '.join(_PROMPTS)} with one of"
        f" {', '.join(_ANSWERS)}, or text."
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _pair(value: Mapping[str, Any]) -> tuple[str, str] | None:
    prompt = next((value[key] for key in _PROMPTS if isinstance(value.get(key), str)), None)
    answer = next((value[key] for key in _ANSWERS if isinstance(value.get(key), str)), None)
    if prompt is None or answer is None:
        return None
    further = value.get("input") if "instruction" in value else None
    return (f"{prompt}\n\n{further}" if isinstance(further, str) and further else prompt), answer


def _encoded(example: Sequence[Mapping[str, Any]] | str, tokenizer: Tokenizer, template: ChatTemplate) -> Answer:
    end = list(tokenizer.end_token_ids[:1])
    if isinstance(example, str):
        return Answer((*tokenizer.encode(example), *end), 1, "text", False)
    prompt, answer = example[:-1], example[-1]["content"]
    if not template.source:
        ids = tokenizer.encode(prompt[-1]["content"])
        return Answer((*ids, *tokenizer.encode(answer, add_special=False), *end), len(ids), "text", False)
    before, whole = template.render(prompt), template.render(example, add_generation_prompt=False)
    if whole.startswith(before):
        after = tokenizer.encode(whole[len(before) :].rstrip(), add_special=False)
    else:  # A template that writes earlier answers otherwise than the one to come, such as without its reasoning.
        after = [*tokenizer.encode(answer, add_special=False), *end]
    ids = tokenizer.encode(before, add_special=False)
    return Answer((*ids, *after), len(ids), "chat", False)
