"""Ollama's `keep_alive`: how long a model stays loaded after a request."""

from __future__ import annotations

import math
import re

from aiohttp import web

from millrace.errors import BadRequest, Forbidden
from millrace.serve.tenancy.owner import is_operator

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"[-+]?(?:{_PART.pattern})+")
NEVER = -1.0


def keep_alive_s(value: str | float | None) -> float | None:
    """Seconds; negative: for ever. A number, or a duration such as "5m" or "1h30m". None if nothing was sent."""
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        if _DURATION.fullmatch(text):
            seconds = sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(text))
            return NEVER if text.startswith("-") else seconds
        try:
            value = float(text)
        except ValueError:
            raise _invalid(value) from None
    if not math.isfinite(value):
        raise _invalid(value)
    return value if value >= 0 else NEVER


def _invalid(value: object) -> BadRequest:
    return BadRequest(
        f"keep_alive is {str(value)[:80]!r}; send seconds, or a duration such as '5m' or '1h30m'; -1 = for ever.",
        param="keep_alive",
    )


def check_keep_alive(value: str | float | None, request: web.Request) -> float | None:
    """The seconds to apply; None: the server's setting stays. Where API keys are required, clients share the models,
    so only operators' keys decide."""
    seconds = keep_alive_s(value)
    if is_operator(request) or seconds is None:
        return seconds
    if seconds == 0:
        raise Forbidden(
            "keep_alive is 0, which would unload the model for all tenants; on a server with API keys only an"
            " operator's key unloads models. Remove it.",
            param="keep_alive",
        )
    return None
