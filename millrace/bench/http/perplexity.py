"""Perplexity of a served model on a fixed text, through the public API: what a setting costs in quality.

The server tokenises the text; it is cut into windows, and each window is sent as a prompt with prompt log-probabilities
requested. Nothing is sampled and requests run one by one, so equal settings give equal figures. Compare only servers
with the same tokenizer: perplexity is per token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from millrace.bench.http.target import Target

TEXT_FILE = Path(__file__).with_name("perplexity.txt")
WINDOW = 512
"""Tokens of a window. The first has no context and is not scored."""


class UnsupportedByServer(Exception):
    """The server lacks a feature that is needed; the message says which."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    value: float
    scored_tokens: int
    windows: int


async def measure_perplexity(
    target: Target,
    *,
    text: str = "",
    window: int = WINDOW,
    on_done: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of `text` (default: the text that ships with Millrace). Raises `UnsupportedByServer`."""
    prefix, ids = await _tokens(target, text or TEXT_FILE.read_text(encoding="utf-8"))
    windows = list(cut(ids, window - len(prefix)))
    total, scored = 0.0, 0
    for done, part in enumerate(windows):
        if on_done is not None:
            on_done(done, len(windows))
        # Without a BOS token before it, a window's first token has no context and cannot be scored.
        logprobs = (await prompt_logprobs(target, [*prefix, *part]))[max(len(prefix) - 1, 0) :]
        total += math.fsum(logprobs)
        scored += len(logprobs)
    return Perplexity(math.exp(-total / scored), scored, len(windows))


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Windows of `size` tokens; a last window of one token is dropped."""
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [part for part in parts if len(part) > 1]


async def prompt_logprobs(target: Target, ids: list[int]) -> list[float]:
    """Log-probabilities of all prompt tokens but the first, by `prompt_logprobs` or by `echo`."""
    ways: tuple[tuple[dict[str, Any], Callable[[Any, list[int]], list[float]]], ...] = (
        ({"max_tokens": 1, "prompt_logprobs": 0}, _from_prompt_logprobs),
        ({"max_tokens": 0, "echo": True, "logprobs": 0}, _from_echo),
    )
    problems = []
    for fields, read in ways:
        body = {"model": target.model, "prompt": ids, "temperature": 0, **fields}
        status, answer = await _post(target, "/v1/completions", body)
        if status == 200:
            try:
                return read(answer["choices"][0], ids)
            except (KeyError, IndexError, TypeError, ValueError):
                problems.append("the answer contains no prompt log-probabilities")
        else:
            problems.append(f"HTTP {status}")
    raise UnsupportedByServer(f"the server returns no prompt log-probabilities ({'; '.join(problems)})")


def _from_prompt_logprobs(choice: Any, ids: list[int]) -> list[float]:
    entries = choice["prompt_logprobs"]
    found = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], ids[1:], strict=True)]
    return _checked(found, len(ids) - 1)


def _from_echo(choice: Any, ids: list[int]) -> list[float]:
    return _checked([float(value) for value in choice["logprobs"]["token_logprobs"][1:]], len(ids) - 1)


def _checked(found: list[float], wanted: int) -> list[float]:
    if len(found) != wanted or not all(math.isfinite(value) and value <= 0 for value in found):
        raise ValueError("expected one log-probability per token")
    return found


async def _tokens(target: Target, text: str) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer adds before every text, and the tokens of the text."""
    plain = await _tokenize(target, text, special=False)
    whole = await _tokenize(target, text, special=True)
    at = len(whole) - len(plain)
    return (whole[:at] if at > 0 and whole[at:] == plain else []), plain


async def _tokenize(target: Target, text: str, *, special: bool) -> list[int]:
    """Ask the server's /tokenize, in vLLM's or llama.cpp's form."""
    forms: tuple[dict[str, Any], ...] = (
        {"model": target.model, "prompt": text, "add_special_tokens": special},
        {"content": text, "add_special": special},
    )
    for body in forms:
        status, answer = await _post(target, "/tokenize", body)
        ids = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if isinstance(ids, list) and len(ids) > 1 and all(isinstance(token, int) for token in ids):
            return ids
    raise UnsupportedByServer("the server has no /tokenize")


async def _post(target: Target, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        async with target.session.post(f"{target.url}{path}", json=body) as response:
            return response.status, json.loads(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UnsupportedByServer(f"{path} failed: {type(error).__name__} {error}".strip()) from error
