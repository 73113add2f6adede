"""Priority classes, and the reasons why requests end."""

from __future__ import annotations

from typing import Literal

CLASS_NAMES = ("interactive", "standard", "batch")
"""Priority classes by number; 0 is the most urgent."""


FinishReason = Literal["stop", "length", "abort", "deadline", "error", "cancelled", "refused", "crash"]
"""Why a request ended."""
