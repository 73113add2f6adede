"""Ollama's prompt templates, which are written in Go's template language: the part of it that prompts need.

Supported are fields (`{{ .Prompt }}`), `if`, `else if`, `else` and `end` with fields, `not`, `and` and `or`, comments,
and the trim markers `{{-` and `-}}`. Everything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from millrace.errors import BadRequest

FIELDS = ("System", "Prompt", "Response", "Suffix")
MAX_CHARS = 65_536
MAX_DEPTH = 32
_ACTION = re.compile(r"\{\{(-\s)?(.*?)(\s-)?\}\}", re.DOTALL)
_SPACE = " \t\r\n"
_REMEDY = f"a template may use {', '.join('.' + name for name in FIELDS)}, if, else, end, not, and, or"


@dataclass(frozen=True, slots=True)
class Shown:
    """`{{ .Name }}`"""

    name: str


@dataclass(frozen=True, slots=True)
class Test:
    """A condition: a field, or `not`, `and` or `or` of fields."""

    names: tuple[str, ...]
    how: str = "and"

    def holds(self, values: Mapping[str, str]) -> bool:
        found = [bool(values.get(name)) for name in self.names]
        if self.how == "not":
            return not found[0]
        return any(found) if self.how == "or" else all(found)


@dataclass(slots=True)
class Branch:
    """`if`; what follows `else` is in `others`."""

    test: Test
    then: list[Node] = field(default_factory=list)
    others: list[Node] = field(default_factory=list)


Node = str | Shown | Branch


class GoTemplate:
    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARS:
            raise _wrong(f"has {len(source)} characters; at most {MAX_CHARS} are allowed")
        self._nodes = _Parser(source).nodes

    @property
    def names(self) -> set[str]:
        """Fields whose text the template shows."""
        return set(_shown(self._nodes))

    def render(self, values: Mapping[str, str]) -> tuple[str, str]:
        """The text before the answer, and the text after it. Without `.Response` the answer is at the end."""
        parts = list(_render(self._nodes, values))
        at = parts.index(None) if None in parts else len(parts)
        return "".join(part or "" for part in parts[:at]), "".join(part or "" for part in parts[at:])


class _Parser:
    def __init__(self, source: str) -> None:
        self.nodes: list[Node] = []
        self._lists = [self.nodes]
        """Where nodes are added: the template, then the branches that are open."""
        self._opened: list[tuple[Branch, bool]] = []
        """Branches that are open, and whether an `else if` opened them, so that they end with the one around them."""
        self._read(source)

    def _read(self, source: str) -> None:
        end, trims = 0, False
        for action in _ACTION.finditer(source):
            text = source[end : action.start()]
            self._add_text(text.rstrip(_SPACE) if action[1] else text, trims)
            self._act(action[2].strip())
            end, trims = action.end(), action[3] is not None
        rest = source[end:]
        if "{{" in rest:
            raise _wrong(f"has an action that is not closed: {rest[rest.index('{{') :][:40]!r}")
        self._add_text(rest, trims)
        if self._opened:
            raise _wrong("has an 'if' without an 'end'")

    def _add_text(self, text: str, trims: bool) -> None:
        text = text.lstrip(_SPACE) if trims else text
        if text:
            self._lists[-1].append(text)

    def _act(self, action: str) -> None:
        words = action.split()
        if action.startswith("/*") and action.endswith("*/"):
            return
        if words[:1] == ["if"]:
            self._open(Branch(_test(words[1:], action)), is_else=False)
        elif words[:1] == ["else"] and self._opened:
            self._else(words[1:], action)
        elif words == ["end"] and self._opened:
            self._end()
        elif len(words) == 1 and words[0].startswith("."):
            self._lists[-1].append(Shown(_name(words[0])))
        else:
            raise _wrong(f"has the action {action[:80]!r}, which is not supported here")

    def _open(self, branch: Branch, *, is_else: bool) -> None:
        if len(self._opened) == MAX_DEPTH:
            raise _wrong(f"has more than {MAX_DEPTH} 'if's inside each other")
        self._lists[-1].append(branch)
        self._opened.append((branch, is_else))
        self._lists.append(branch.then)

    def _else(self, words: list[str], action: str) -> None:
        branch, _ = self._opened[-1]
        if self._lists[-1] is not branch.then:
            raise _wrong("has two 'else' of one 'if'")
        self._lists[-1] = branch.others
        if words[:1] == ["if"]:
            self._open(Branch(_test(words[1:], action)), is_else=True)
        elif words:
            raise _wrong(f"has the action {action[:80]!r}, which is not supported here")

    def _end(self) -> None:
        is_else = True
        while is_else:
            _, is_else = self._opened.pop()
            self._lists.pop()


def _test(words: list[str], action: str) -> Test:
    how = words[0] if words and words[0] in ("not", "and", "or") else ""
    names = tuple(_name(word) for word in (words[1:] if how else words))
    if not names or (how in ("", "not") and len(names) > 1):
        raise _wrong(f"has the condition {action[:80]!r}, which is not supported here")
    return Test(names, how or "and")


def _name(word: str) -> str:
    name = word.removeprefix("$").removeprefix(".")
    if name not in FIELDS or "." not in word:
        raise _wrong(f"uses {word[:80]!r}, which is not supported here")
    return name


def _shown(nodes: list[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Shown):
            yield node.name
        elif isinstance(node, Branch):
            yield from _shown(node.then + node.others)


def _render(nodes: list[Node], values: Mapping[str, str]) -> Iterator[str | None]:
    """Texts; None stands for the answer."""
    for node in nodes:
        if isinstance(node, str):
            yield node
        elif isinstance(node, Shown):
            yield None if node.name == "Response" else values.get(node.name, "")
        else:
            yield from _render(node.then if node.test.holds(values) else node.others, values)


def _wrong(what: str) -> BadRequest:
    return BadRequest(f"'template' {what}; {_REMEDY}.", param="template", code="unsupported_parameter")
