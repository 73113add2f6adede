"""Training data from a running server: both models answer each question, and what they say is compared with what is
expected."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError

TIMEOUT_S = 300.0
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"\w+")


class Question(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    expected: str | list[str]
    """One of these is right."""
    max_tokens: int = 32


class Answered(msgspec.Struct, frozen=True):
    text: str
    num_tokens: int
    """Of the prompt and of the answer."""
    confidence: float


def read_questions(path: Path) -> list[Question]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.", param="data") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found += [msgspec.json.decode(line, type=Question)] if line.strip() else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="data") from error
    if not found:
        raise ConfigError(f"{path} has no questions; write one JSON object per line.", param="data")
    return found


def quality(answer: str, expected: str | list[str]) -> float:
    """1 for a right answer: a number is compared with the last one in the answer, a single letter with its first word,
    and any other text must be part of it, whatever its case and punctuation."""
    return float(any(_is_right(answer, one) for one in ([expected] if isinstance(expected, str) else expected)))


def _is_right(answer: str, expected: str) -> bool:
    if _NUMBER.fullmatch(expected.strip()):
        numbers = _NUMBER.findall(answer)
        return bool(numbers) and float(numbers[-1].replace(",", "")) == float(expected.replace(",", ""))
    words, wanted = _WORD.findall(answer.casefold()), _WORD.findall(expected.casefold())
    if len(expected.strip()) == 1:
        return words[:1] == wanted
    return bool(wanted) and any(words[at : at + len(wanted)] == wanted for at in range(len(words)))


def ask_all(url: str, questions: list[Question], small: str, large: str, num_at_once: int) -> Iterator[dict[str, Any]]:
    """A line of training data for each question, in order."""
    with ThreadPoolExecutor(num_at_once) as pool:
        pending = [[pool.submit(_ask, url, model, one) for model in (small, large)] for one in questions]
        try:
            for question, answers in zip(questions, pending, strict=True):
                weak, strong = (one.result() for one in answers)
                yield {
                    "messages": question.messages,
                    "small": quality(weak.text, question.expected),
                    "large": quality(strong.text, question.expected),
                    "confidence": round(weak.confidence, 4),
                    "small_tokens": weak.num_tokens,
                    "large_tokens": strong.num_tokens,
                    "small_answer": weak.text,
                    "large_answer": strong.text,
                }
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ask(url: str, model: str, question: Question) -> Answered:
    body = {"model": model, "messages": question.messages, "max_tokens": question.max_tokens}
    data = json.dumps({**body, "temperature": 0, "logprobs": True}).encode()
    asked = urllib.request.Request(url.rstrip("/") + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{model!r} answered {error.code}: {error.read()[:300].decode(errors='replace')}") from error
    except OSError as error:
        raise ConfigError(f"{url} does not answer: {error}", param="url") from error
    choice = found["choices"][0]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    confidence = math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0
    return Answered(choice["message"]["content"] or "", found["usage"]["total_tokens"], min(1.0, confidence))
