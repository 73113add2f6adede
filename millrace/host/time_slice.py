"""Scheduler time slices of threads: short for threads that wait often, long for threads that compute.

Fronts and the engine's loop work for a fraction of a millisecond and wait again; the threads of a CPU step use every
core they get. Since Linux 6.12, a woken thread with a shorter slice preempts a running one at once instead of waiting
for the slice to end; shares of CPU time stay the same. Long slices for the compute threads give this advantage to every
other thread on the machine, clients included. Where the system does not support or allow it, nothing happens: only
latency depends on it.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

SHORT_NS = 100_000
"""The shortest slice the kernel grants."""
LONG_NS = 5_000_000
"""Longer than the default of 0.7 to 2.8 ms, which depends on the number of cores."""

_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""sched_setattr, sched_getattr"""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime (of ordinary threads: the slice), deadline, period"""
_RUNTIME = 5
_ORDINARY = (0, 3)
"""SCHED_OTHER, SCHED_BATCH"""


def request_short_slices() -> None:
    """For this thread and the threads it starts from now on."""
    _set_slice(SHORT_NS)


def request_long_slices() -> None:
    """For this thread and the threads it starts from now on."""
    _set_slice(LONG_NS)


def request_default_slices() -> None:
    """The system's default, for this thread and the threads it starts from now on."""
    _set_slice(0)


def own_slice_ns() -> int | None:
    """This thread's slice; None if the system does not tell."""
    attributes = _attributes()
    return None if attributes is None else int(attributes[_RUNTIME])


def _set_slice(nanoseconds: int) -> None:
    attributes = _attributes()
    if attributes is None or attributes[1] not in _ORDINARY:
        return
    attributes[_RUNTIME] = nanoseconds
    _call(0, _ATTRIBUTES.pack(*attributes), 0)


def _attributes() -> list[int] | None:
    room = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if not _call(1, room, _ATTRIBUTES.size, 0):
        return None
    return list(_ATTRIBUTES.unpack(room.raw))


def _call(which: int, attributes: object, *rest: int) -> bool:
    if sys.platform != "linux" or platform.machine() not in _SYSCALLS:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(_SYSCALLS[platform.machine()][which], 0, attributes, *rest) == 0)
