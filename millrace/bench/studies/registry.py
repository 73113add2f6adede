"""All measured studies by name."""

from __future__ import annotations

from millrace.bench.studies import (
    answers,
    cold_start,
    constraints,
    documents,
    formats,
    kv_formats,
    mechanisms,
    sessions,
)
from millrace.bench.studies.measured import MeasuredStudy

MEASURED: dict[str, MeasuredStudy] = {
    **formats.STUDIES,
    **kv_formats.STUDIES,
    **mechanisms.STUDIES,
    **cold_start.STUDIES,
    **constraints.STUDIES,
    **answers.STUDIES,
    **documents.STUDIES,
    **sessions.STUDIES,
}
