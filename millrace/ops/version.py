"""What a version of an op declares about itself, and what choosing one returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Shape = Mapping[str, Any]
"""Facts about the sizes an op will meet, known when the model is loaded: `rows_in=576`, `tied=True`, …"""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")


def _fits_all(_: Shape) -> bool:
    return True


def _nothing_missing(_: torch.device) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Version:
    """One way to compute an op. The op's file says what `make` takes and what it returns."""

    op: str
    name: str
    make: Callable[..., Any]
    when: str
    """One sentence: when this version is the one to take, and why."""
    devices: tuple[str, ...] = DEVICES
    dtypes: tuple[torch.dtype, ...] = FLOATS
    invariant_on: tuple[str, ...] = ()
    """Device kinds on which a token's result does not depend on the other tokens of the step, bit for bit."""
    fits: Callable[[Shape], bool] = _fits_all
    missing: Callable[[torch.device], str] = _nothing_missing
    """What this machine lacks to run it, as a clause; empty when nothing is missing."""

    def batch_invariant(self, device: torch.device) -> bool:
        return device.type in self.invariant_on

    def objection(self, device: torch.device, dtype: torch.dtype, deterministic: bool, shape: Shape) -> str:
        """Why this version cannot be taken here; empty when it can."""
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(short_name(known) for known in self.dtypes)}"
        if not self.fits(shape):
            return "does not take these sizes"
        if deterministic and not self.batch_invariant(device):
            return "depends on the batch"
        return self.missing(device)


@dataclass(frozen=True, slots=True)
class Choice:
    """The version taken, and for each better one that was passed over, why."""

    version: Version
    passed_over: tuple[tuple[Version, str], ...]

    @property
    def make(self) -> Callable[..., Any]:
        return self.version.make

    @property
    def reason(self) -> str:
        skipped = "; ".join(f"{version.name} {why}" for version, why in self.passed_over)
        return f"{self.version.when} ({skipped})" if skipped else self.version.when


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
