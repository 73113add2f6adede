"""The error that all benchmarks raise."""

from __future__ import annotations

from millrace.errors import MillraceError


class BenchError(MillraceError):
    """Something could not be measured; the message says why."""

    type = "bench_error"
