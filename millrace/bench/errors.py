"""The one error of the benchmarks."""

from __future__ import annotations

from millrace.errors import MillraceError


class BenchError(MillraceError):
    """Something could not be measured; the message says why."""

    type = "bench_error"
