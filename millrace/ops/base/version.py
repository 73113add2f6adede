"""`Version` describes one implementation of an op; `Choice` is the version that was chosen, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Shape = Mapping[str, Any]
"""Sizes and properties of the model, known when it is loaded: `in_features=576`, `quantised=True`, …"""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")


def _fits_all(_: Shape) -> bool:
    return True


def _nothing_missing(_: torch.device) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Version:
    """One implementation of an op. The op's file documents what `make` takes and returns."""

    op: str
    name: str
    make: Callable[..., Any]
    when: str
    """What it does and when it is the best choice, in one phrase; `millrace ops` prints it."""
    devices: tuple[str, ...] = DEVICES
    dtypes: tuple[torch.dtype, ...] = FLOATS
    invariant_on: tuple[str, ...] = ()
    """Device types on which a token's result is bit-identical whatever other tokens are in the step."""
    fits: Callable[[Shape], bool] = _fits_all
    missing: Callable[[torch.device], str] = _nothing_missing
    """What this machine lacks to run it, as a clause ("needs …"); empty if nothing."""

    def is_batch_invariant(self, device: torch.device) -> bool:
        return device.type in self.invariant_on

    def reject_reason(self, device: torch.device, dtype: torch.dtype, deterministic: bool, shape: Shape) -> str:
        """Why this version cannot be used here, as a clause; empty if it can."""
        if device.type not in self.devices:
            return f"runs only on {' and '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"supports only {', '.join(dtype_name(known) for known in self.dtypes)}"
        if not self.fits(shape):
            return "does not support these sizes"
        if deterministic and not self.is_batch_invariant(device):
            return "is not batch-invariant"
        return self.missing(device)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen version, and the better ones that were rejected, each with its reason."""

    version: Version
    rejected: tuple[tuple[Version, str], ...]

    @property
    def make(self) -> Callable[..., Any]:
        return self.version.make

    @property
    def reason(self) -> str:
        skipped = "; ".join(f"{version.name} {reason}" for version, reason in self.rejected)
        return f"{self.version.when} ({skipped})" if skipped else self.version.when


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
