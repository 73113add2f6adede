"""How fast a GPU can be: looked up by name in `device_limits.toml`, else computed from what its driver reports."""

from __future__ import annotations

import contextlib
import ctypes
import tomllib
from dataclasses import dataclass
from importlib import resources

from millrace.errors import ConfigError

STEP_SHARE = 0.6
"""Assumed share of the peak FLOP/s that whole steps reach, where no figure was measured. About the H200's share."""
FLOPS_PER_CLOCK = {
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 512,
    (8, 7): 1024,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 512,
}
"""Dense 16-bit tensor-core FLOPs per multiprocessor and clock, by compute capability; the lower figure where
consumer and data-center GPUs of one capability differ."""
UNKNOWN_FLOPS_PER_CLOCK = 512

# Numbers of `CUdevice_attribute` in cuda.h.
_CLOCK_KHZ, _NUM_MULTIPROCESSORS, _MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS, _MAJOR, _MINOR = 13, 16, 36, 37, 75, 76


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    flops: float
    """Peak dense bfloat16 FLOP/s."""
    bytes_per_s: float
    """Peak memory bandwidth."""
    step_flops: float
    """FLOP/s that whole prefill steps reach."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What the driver reports."""

    capability: tuple[int, int]
    num_multiprocessors: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int


def device_limits(name: str, index: int = 0) -> DeviceLimits:
    """Limits of the GPU with this name; `index` is its number for the driver, used only if the name is unknown."""
    entry = known_devices().get(name)
    if entry is None:
        return computed_limits(read_properties(index))
    return DeviceLimits(entry["flops"], entry["bytes_per_s"], entry.get("step_flops", STEP_SHARE * entry["flops"]))


def known_device(text: str) -> tuple[str, DeviceLimits]:
    """The one device of the table whose name contains these words, such as `h200` or `a100 80gb`."""
    words = text.lower().replace("-", " ").split()
    found = [name for name in known_devices() if all(word in name.lower() for word in words)]
    exact = [name for name in found if set(words) <= set(name.lower().replace("-", " ").split())]
    for names in (exact, found):
        if names:
            shortest = min(names, key=len)
            return shortest, device_limits(shortest)
    raise ConfigError(f"There is no data sheet for {text!r}. Known devices: {', '.join(sorted(known_devices()))}.")


def computed_limits(properties: DeviceProperties | None) -> DeviceLimits:
    """An estimate from the properties; all 0 if there are none."""
    if properties is None:
        return DeviceLimits(0.0, 0.0, 0.0)
    per_clock = FLOPS_PER_CLOCK.get(properties.capability, UNKNOWN_FLOPS_PER_CLOCK)
    flops = 1e3 * properties.clock_khz * properties.num_multiprocessors * per_clock
    # Data is transferred on both edges of the memory clock.
    bytes_per_s = 2 * 1e3 * properties.memory_clock_khz * properties.memory_bus_bits / 8
    return DeviceLimits(flops, bytes_per_s, STEP_SHARE * flops)


def known_devices() -> dict[str, dict[str, float]]:
    return tomllib.loads(resources.files("millrace.host").joinpath("device_limits.toml").read_text("utf-8"))


def read_properties(index: int) -> DeviceProperties | None:
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), index) != 0:
            return None

        def attribute(number: int) -> int:
            value = ctypes.c_int()
            return value.value if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 else 0

        return DeviceProperties(
            capability=(attribute(_MAJOR), attribute(_MINOR)),
            num_multiprocessors=attribute(_NUM_MULTIPROCESSORS),
            clock_khz=attribute(_CLOCK_KHZ),
            memory_clock_khz=attribute(_MEMORY_CLOCK_KHZ),
            memory_bus_bits=attribute(_MEMORY_BUS_BITS),
        )
    return None
