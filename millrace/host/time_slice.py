"""How soon a thread runs once it is woken beside threads that compute.

A front, and an engine's loop, work for a fraction of a millisecond and wait again; a CPU step's threads want every core
for as long as they get it. Linux (6.12 and later) lets a thread that has asked for shorter slices than the running one
take its core at once, instead of waiting for a slice to end; what each of them gets in all is the same. With long
slices for those that compute, this holds for everybody else on the machine, clients among them. Elsewhere, and where it
is not allowed, nothing happens: only latency depends on it.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

SHORT_NS = 100_000
"""The shortest slice that the kernel grants."""
LONG_NS = 5_000_000
"""Longer than anybody has who did not ask: 0.7 to 2.8 ms, by the number of cores."""

_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""sched_setattr, sched_getattr"""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime (of ordinary threads: the slice), deadline, period"""
_RUNTIME = 5
_ORDINARY = (0, 3)
"""SCHED_OTHER, SCHED_BATCH"""


def ask_for_short_slices() -> None:
    """For this thread, and those that it starts from now on."""
    _set_slice(SHORT_NS)


def ask_for_long_slices() -> None:
    """For this thread, and those that it starts from now on."""
    _set_slice(LONG_NS)


def ask_for_usual_slices() -> None:
    """The system's own length, for this thread and those that it starts from now on."""
    _set_slice(0)


def own_slice_ns() -> int | None:
    """What this thread's slice is, or None where the system does not say."""
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
