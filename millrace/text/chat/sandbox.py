"""Jinja environment for chat templates: configured as in Hugging Face, with limits on time and memory.

A template comes with the model, so it is untrusted code. It sees only plain data, cannot reach Python objects, and is
stopped when it runs too long, iterates too often or builds too large a value. The limits are far above what real
templates need and never change their output. Memory is checked where Jinja has hooks: repetition, addition, padding,
attributes and the output. A chain of `~` is not checked.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OUTPUT_CHARS = 64 * 1024 * 1024
MAX_VALUE_ITEMS = MAX_OUTPUT_CHARS
"""Maximum characters of a string or items of a list."""
MAX_RANGE_ITEMS = 1_000_000
"""Maximum items of all `range`s of one rendering together."""
MAX_SECONDS = 10.0
_MAX_WIDTH = 100_000
_MAX_POWER_BITS = 65_536
_TICKS_PER_CLOCK_READ = 1024
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{6,}|\d*\.\d{6,})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{6,}")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox of one model's templates. Each rendering has its own budget, also in other threads."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        self._budget = threading.local()
        self.filters["tojson"] = _to_json
        self.filters["center"] = _limited_width(self.filters["center"])
        self.filters["indent"] = _limited_width(self.filters["indent"])
        self.filters["format"] = _limited_format(self.filters["format"])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["range"] = self._range
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace

    def render_within_budget(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        self._budget.ticks = _TICKS_PER_CLOCK_READ
        self._budget.deadline = time.monotonic() + MAX_SECONDS
        self._budget.range_items = MAX_RANGE_ITEMS
        parts: list[str] = []
        num_chars = 0
        for part in template.generate(variables):
            parts.append(part)
            num_chars += len(part)
            self._tick()
            if num_chars > MAX_OUTPUT_CHARS:
                raise SecurityError(f"it writes more than {MAX_OUTPUT_CHARS} characters")
        return "".join(parts)

    def _tick(self) -> None:
        budget = self._budget
        budget.ticks = getattr(budget, "ticks", _TICKS_PER_CLOCK_READ) - 1
        if budget.ticks <= 0:
            budget.ticks = _TICKS_PER_CLOCK_READ
            if time.monotonic() > getattr(budget, "deadline", float("inf")):
                raise SecurityError(f"it runs for more than {MAX_SECONDS:g} seconds")

    def _range(self, *bounds: int) -> range:
        items = range(*bounds)
        left = getattr(self._budget, "range_items", MAX_RANGE_ITEMS) - len(items)
        if left < 0:
            raise SecurityError(f"it iterates over more than {MAX_RANGE_ITEMS} items")
        self._budget.range_items = left
        return items

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._tick()
        return _sized(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._tick()
        return _sized(super().getitem(obj, argument))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The parameter names cannot collide with a template's keyword arguments."""
        __self._tick()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_str_call(owner, getattr(__obj, "__name__", ""), args)
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._tick()
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class _TemplateDict:
    """`dict` as a function, without access to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """Jinja's namespace, without names that start with an underscore."""

    def __init__(
        *args: Any, **kwargs: Any
    ) -> None:  # Without a parameter `self`, so that a template can set that name.
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it sets the attribute {name!r} of a namespace; names must not begin with an underscore")


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's filter, does not escape HTML, as models were trained without it."""
    if isinstance(indent, int) and indent > _MAX_WIDTH:
        raise SecurityError(f"it indents by {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _sized(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_VALUE_ITEMS:
        raise SecurityError(f"it builds a value of {len(value)} items")
    return value


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        size, count = (left, right) if hasattr(left, "__len__") else (right, left)
        if hasattr(size, "__len__") and isinstance(count, int) and len(size) * count > MAX_VALUE_ITEMS:
            raise SecurityError(f"it repeats a value {count} times")
    elif operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__") and len(left) + len(right) > MAX_VALUE_ITEMS:
            raise SecurityError(f"it builds a value of {len(left) + len(right)} items")
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            raise SecurityError("it computes a power that is too large")
    elif isinstance(left, str):
        _check_percent(left, right)


def _check_percent(text: str, values: Any) -> None:
    given = values if isinstance(values, tuple) else (values,)
    by_value = "*" in text and any(isinstance(one, int) and one > _MAX_WIDTH for one in given)
    if by_value or _WIDE_PERCENT.search(text):
        raise SecurityError("it pads a string too far")


def _check_str_call(text: str, method: str, args: tuple[Any, ...]) -> None:
    if method in ("format", "format_map"):
        too_wide = _WIDE_BRACES.search(text) is not None
    elif method in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        too_wide = any(isinstance(arg, int) and arg > _MAX_WIDTH for arg in args)
    else:
        too_wide = method == "replace" and len(args) > 1 and _replaced_size(text, args) > MAX_VALUE_ITEMS
    if too_wide:
        raise SecurityError("it pads a string too far")


def _replaced_size(text: str, args: tuple[Any, ...]) -> int:
    old, new = args[0], args[1]
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * len(new)


def _limited_width(filter_: Callable[..., str]) -> Callable[..., str]:
    def limited(value: Any, width: Any = None, *args: Any, **kwargs: Any) -> str:
        given = [width, kwargs.get("width")]
        if any(isinstance(one, int) and one > _MAX_WIDTH for one in given):
            raise SecurityError("it pads a string too far")
        return filter_(value, *([] if width is None else [width]), *args, **kwargs)

    return limited


def _limited_format(filter_: Callable[..., str]) -> Callable[..., str]:
    def limited(value: Any, *args: Any, **kwargs: Any) -> str:
        _check_percent(str(value), args or tuple(kwargs.values()))
        return filter_(value, *args, **kwargs)

    return limited
