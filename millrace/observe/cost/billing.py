"""Tokens and dollars per tenant, model and day from the audit log, for billing."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(slots=True)
class Bill:
    day: str
    """UTC."""
    tenant: str
    model: str
    """Empty in records of versions that did not write it."""
    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Without reasoning."""
    reasoning_tokens: int = 0
    usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per million tokens."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0
    reasoning: float = 0.0


def bills(lines: Iterable[str], prices: Prices) -> tuple[list[Bill], int]:
    """By day, tenant and model, and the number of lines that are not records."""
    found: dict[tuple[str, str, str], Bill] = {}
    broken = 0
    for line in lines:
        try:
            record = json.loads(line)
            day, tenant = str(record["time"])[:10], str(record["tenant"])
            status, prompt, output = int(record["status"]), record["prompt_tokens"], record["output_tokens"]
        except (ValueError, KeyError, TypeError):
            broken += 1
            continue
        if prompt is None:
            continue  # Nothing was generated.
        model = str(record.get("model") or "")
        bill = found.setdefault((day, tenant, model), Bill(day, tenant, model))
        cached = int(record.get("cached_tokens") or 0)
        bill.requests += 1
        bill.failed += status >= 400
        bill.input_tokens += int(prompt) - cached
        bill.cached_tokens += cached
        reasoning = int(record.get("reasoning_tokens") or 0)
        bill.output_tokens += int(output or 0) - reasoning
        bill.reasoning_tokens += reasoning
    for bill in found.values():
        usd = bill.input_tokens * prices.input + bill.cached_tokens * prices.cached
        usd += bill.output_tokens * prices.output + bill.reasoning_tokens * prices.reasoning
        bill.usd = round(usd / 1e6, 6)
    return [found[key] for key in sorted(found)], broken


def write_bills(found: list[Bill], form: Literal["csv", "jsonl"]) -> str:
    records = [asdict(bill) for bill in found]
    if form == "jsonl":
        return "".join(json.dumps(record) + "\n" for record in records)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(Bill("", "", ""))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
