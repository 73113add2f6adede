"""llguidance's errors as sentences for the client."""

from __future__ import annotations

import json
import re

_MAX_SHOWN_CHARS = 300
_BEYOND = re.compile(r"look-around|backreferences|lookarounds not supported yet; (\w+)")
"""What llguidance says of a regular expression that looks beyond the next character."""
_ANCHORS = {"Start": "'^' after its start", "End": "'$' before its end"}

_TYPES = "'string', 'number', 'integer', 'boolean', 'object', 'array', 'null'"


def sentence_of(problem: str, noun: str) -> str:
    """What llguidance said, as a sentence that names the cause. `noun`: what the client sent."""
    place = re.search(r"while processing json-schema://\S*?(#\S*)", problem)
    what = re.split(r"\n  while processing|\n +\d+ \| ", problem, maxsplit=1)[0]
    what = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", what)
    what = re.sub(r"^at \d+\(\d+\): invalid regex .* \(in regex\): (?=regex parse)", "", what)
    where = f" (at {place[1]})" if place else ""
    return _sentence(" ".join(what.split()), where, noun)


def _sentence(problem: str, where: str, noun: str) -> str:
    if found := re.match(r"Unimplemented keys: (\[.*\])", problem):
        names = ", ".join(repr(name) for name in json.loads(found[1]))
        return f"The {noun} uses {names}{where}, which is not supported; remove it."
    if found := re.match(r"Unknown format: (.*)", problem):
        return f"The {noun} uses the format {found[1]!r}{where}, which is not supported; remove it or use a pattern."
    if found := re.match(r"Invalid type: (.*)", problem):
        return f"The {noun} has the type {found[1]!r}{where}; use one of {_TYPES}."
    if problem.startswith("oneOf constraints"):
        return f"The {noun} uses 'oneOf' whose alternatives may overlap{where}, which is not supported; use 'anyOf'."
    if found := _BEYOND.search(problem):
        what = _ANCHORS.get(found[1]) or ("a word boundary" if found[1] else found[0])
        where += "" if noun == "regular expression" else " in a regular expression"
        return f"The {noun} uses {what}{where}, which is not supported; remove it."
    if "precomputation failed" in problem:
        return f"The {noun} is too complex; simplify it."
    if "recursion limit" in problem:
        return f"The {noun} is nested too deeply; send fewer levels."
    if len(problem) > _MAX_SHOWN_CHARS:
        problem = problem[:_MAX_SHOWN_CHARS] + "…"
    return f"The {noun} cannot be used{where}: {problem.rstrip('.')}."
