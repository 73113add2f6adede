"""Triton kernels in tests: on the GPU where there is one, elsewhere through Triton's interpreter on the CPU.

Import this before anything that imports Triton: a kernel is bound to the interpreter or to the GPU when it is
defined.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed: pip install -r requirements-dev.txt")

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
interpreted = device.type == "cpu"
