"""The GPU's context, made by the driver while torch is still being imported: 0.4 s that nobody waits for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from importlib import metadata

from millrace.config import RunConfig


def has_gpu() -> bool:
    """Whether the machine seems to have one, without asking a library."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl")


def make_context_ahead(config: RunConfig) -> None:
    """Begin, where a GPU will be used. Whatever goes wrong, torch meets again and says."""
    if config.device != "cpu" and has_gpu():
        threading.Thread(target=_retain_first, name="gpu-context", daemon=True).start()


def _retain_first() -> None:
    """Never released: the context that torch will use lives as long as the process."""
    with contextlib.suppress(OSError, AttributeError, metadata.PackageNotFoundError):
        if metadata.version("torch").endswith("+cpu"):
            return
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
