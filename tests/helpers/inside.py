"""The only ways of tests into parts that have no public name, each with its reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from millrace import LLM
from millrace.models.decoder import Decoder
from millrace.ops.cpp import native
from millrace.plan.scheduler import Scheduler


def weights_of(decoder: Any) -> Any:
    """Of a decoder or a drafter: in which form each is kept decides the kernels, and shows in no result."""
    return decoder._weights


def set_head(decoder: Decoder, head: object) -> None:
    """No checkpoint makes a head that fails, or that draws greedily on every device."""
    decoder._weights = dataclasses.replace(weights_of(decoder), head=head)


def program_of(decoder: Any) -> Any:
    """What runs its layers: a test puts another version of one op in place."""
    return decoder._program


def client_of(llm: LLM) -> Any:
    """A user of LLM sees neither statistics nor whether the engine has failed."""
    return llm._client


def part_of(scheduler: Scheduler, name: str) -> Any:
    """`seating`, `composer`, `drafts` or `preempting`: what they do alone, no plan can force."""
    return getattr(scheduler, f"_{name}")


def without_compiler(monkeypatch: pytest.MonkeyPatch, reason: str = "needs a C++ compiler") -> None:
    """As on a machine that has none."""
    monkeypatch.setattr(native, "native_or_reason", lambda: reason)
