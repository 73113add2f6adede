"""Which of several sequences of a prompt are returned: the likeliest (`best_of`), or by a vote (`self_consistency`)."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from millrace.errors import BadRequest
from millrace.params.sampling import MAX_CHOICES
from millrace.serve.generate.checks import MAX_SEQUENCES, check_range
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.choosing.beam_fields import SelfConsistency
from millrace.serve.generate.generation import Generation

MAX_PATTERN_CHARS = 1000
MATCH_S = 0.2
"""Longest search for a pattern in all answers of a vote, since the front waits for it. What is not found by then does
not count."""
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
"""One step of a JSON path: a key, or an index in brackets."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """How a vote ended."""

    value: str | None
    """The field of the returned answer; None if no answer had one."""
    votes: int
    samples: int

    @property
    def has_majority(self) -> bool:
        return 2 * self.votes > self.samples


def num_sequences(best_of: int | None, n: int, stream: bool, vote: SelfConsistency | None) -> int:
    """Sequences per prompt."""
    if vote is not None:
        return _num_voters(vote, best_of, n, stream)
    if best_of is None:
        return n
    check_range("best_of", best_of, 1, MAX_SEQUENCES)
    if best_of < n:
        raise BadRequest(f"best_of is {best_of}, below n {n}; raise it to at least {n}.", param="best_of")
    if best_of > n and stream:
        raise BadRequest(
            f"best_of is {best_of} and n is {n}, but which choices are best is known only at the end;"
            " set stream to false or best_of to n.",
            param="best_of",
        )
    return best_of


def _num_voters(vote: SelfConsistency, best_of: int | None, n: int, stream: bool) -> int:
    if (vote.regex is None) == (vote.json_path is None):
        raise BadRequest("'self_consistency' needs either 'regex' or 'json_path'.", param="self_consistency")
    if n != 1 or best_of is not None or stream:
        raise BadRequest(
            "'self_consistency' returns one answer when all are known; remove 'n', 'best_of' and 'stream'.",
            param="self_consistency",
        )
    check_range("self_consistency.samples", vote.samples, 2, MAX_CHOICES)
    if vote.regex is not None:
        _check_pattern(vote.regex)
    if vote.json_path is not None and not _is_path(_path(vote.json_path)):
        raise BadRequest(
            f"self_consistency.json_path is {vote.json_path[:80]!r}; write keys and indices, such as a.b[0].c.",
            param="self_consistency.json_path",
        )
    return vote.samples


def _path(written: str) -> str:
    """A JSON path without the `$` that stands for the whole answer: `$.a[0]` and `a[0]` are the same."""
    return written[1:] if written[:2] in ("$", "$.", "$[") else written


def _is_path(path: str) -> bool:
    return "".join(one[0] for one in _STEP.finditer(path)) == path


def _check_pattern(pattern: str) -> None:
    import regex  # 30 ms to import, and few requests vote

    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadRequest(
            f"self_consistency.regex has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are allowed.",
            param="self_consistency.regex",
        )
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise BadRequest(
            f"self_consistency.regex is not a regular expression: {error}.", param="self_consistency.regex"
        ) from None


def best(choices: list[CollectedChoice], generation: Generation) -> list[CollectedChoice]:
    """The likeliest n sequences of each prompt, likeliest first; without `best_of` all of them in order."""
    per_prompt = generation.num_sequences
    if generation.n == per_prompt:
        return choices
    found: list[CollectedChoice] = []
    for first in range(0, len(choices), per_prompt):
        ranked = sorted(choices[first : first + per_prompt], key=lambda choice: -choice.output.mean_logprob)
        found += ranked[: generation.n]
    return found


def elect(choices: list[CollectedChoice], vote: SelfConsistency) -> tuple[CollectedChoice, Ballot]:
    """The likeliest of the answers whose field is the most frequent. Equally frequent ones: the likelier answer."""
    until = time.monotonic() + MATCH_S
    fields = [extracted(choice.output.text, vote, until) for choice in choices]
    counts = Counter(field for field in fields if field is not None)
    most = max(counts.values(), default=0)
    leading = [
        (choice, field)
        for choice, field in zip(choices, fields, strict=True)
        if not most or (field is not None and counts[field] == most)
    ]
    winner, field = max(leading, key=lambda one: one[0].output.mean_logprob)
    return winner, Ballot(field, most, len(choices))


def extracted(text: str, vote: SelfConsistency, until: float) -> str | None:
    """The field of an answer, or None. A search for a pattern ends at `until`, on `time.monotonic`."""
    if vote.regex is not None:
        return _matched(vote.regex, text, until - time.monotonic())
    try:
        value: Any = msgspec.json.decode(text)
        for step in _STEP.finditer(_path(vote.json_path or "")):
            value = value[step[1]] if step[1] is not None else value[int(step[2])]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 7.0 and 7 agree.
    return value if isinstance(value, str) else msgspec.json.encode(value, order="deterministic").decode()


def _matched(pattern: str, text: str, seconds: float) -> str | None:
    import regex

    if seconds <= 0:
        return None
    try:
        found = regex.findall(pattern, text, timeout=seconds)
    except TimeoutError:
        return None
    if not found:
        return None
    last = found[-1] if isinstance(found[-1], str) else found[-1][0]
    return str(last).strip()
