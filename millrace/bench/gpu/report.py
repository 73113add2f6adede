"""Records of `millrace bench gpu` as tables: markdown with the peer's figures, and one for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from millrace.bench.gpu.peer_figures import MAIN_KEYS, Key, Peers, key_of, value_of
from millrace.errors import ConfigError

Record = Mapping[str, Any]

TITLES = {
    "decode": ("Decode: ms per token", "batch {}"),
    "ttft": ("TTFT of one request: ms", "{:,} tokens"),
    "mixed": ("Mixed load: output tokens per second", "{:,} requests"),
    "prefix": ("Shared prefix: total seconds", "{:,} requests"),
    "prefix_ttft": ("Shared prefix: TTFT with a cached prefix, ms", "warm"),
    "startup": ("Start: seconds to the first token", "start"),
    "host": ("Host time: ms per step", "batch {}"),
}
"""Title of the table and column heading for each case."""
FURTHER = {
    "decode": (("all rows running", "step_ms"), ("by difference", "tpot_diff_ms")),
    "prefix_ttft": (("all new", "cold_ms"),),
    "startup": (("ready", "ready_s"), ("all graphs captured", "warm_s")),
    "host": (("planning", "plan_ms"), ("launch to result", "step_ms")),
}
"""Further lines below our main figure: label and key."""
NONE = "–"
_PLAIN_WIDTH = 140
_UNITS = {"out_tok_s": "tok/s", "seconds": "s"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of one or more runs; for the same figure, the last line counts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON; expected the output of bench gpu.") from error
        if not isinstance(record, dict) or not isinstance(record.get("case"), str):
            raise ConfigError(f"{path}, line {number} is not a figure of bench gpu: it has no 'case'.")
        records.append(record)
    return records


def markdown(records: Sequence[Record], peers: Peers) -> str:
    """All tables: our figures where measured, the peer's figures and the bars where known."""
    ours = {key_of(record): record for record in records if record["case"] in MAIN_KEYS}
    parts = [_case_table(case, ours, peers) for case in TITLES]
    parts += [profile_table(record) for record in records if record["case"] == "profile" and "kernels" in record]
    return "\n\n".join(part for part in parts if part) + "\n"


def _case_table(case: str, ours: Mapping[Key, Record], peers: Peers) -> str:
    keys = [key for key in [*peers.figures, *ours] if key[1] == case]
    if not keys:
        return ""
    title, heading = TITLES[case]
    sizes = sorted({key[2] for key in keys})
    lines = [
        f"**{title}**",
        "",
        "| model | | " + " | ".join(heading.format(size) for size in sizes) + " |",
        "| --- | --- |" + " ---: |" * len(sizes),
    ]
    for model in dict.fromkeys(key[0] for key in keys):
        lines += _model_lines(model, case, sizes, ours, peers)
    return "\n".join(lines)


def _model_lines(
    model: str, case: str, sizes: Sequence[int], ours: Mapping[Key, Record], peers: Peers
) -> Iterable[str]:
    """Our figures with further lines, the peer's, the bars; empty lines are left out."""
    keys = [(model, case, size) for size in sizes]
    records = [ours.get(key, {}) for key in keys]
    known = [peers.figures.get(key) for key in keys]
    yield _line(model, "Millrace", [_own_cell(record, peers) for record in records])
    for label, key in FURTHER.get(case, ()):
        if any(key in record for record in records):
            yield _line("", label, [_number(record.get(key)) for record in records])
    if any(figure is not None and figure.peer is not None for figure in known):
        yield _line("", peers.engine.replace("vllm-", "vLLM "), [_number(f.peer if f else None) for f in known])
    if any(figure is not None and figure.bar is not None for figure in known):
        yield _line("", "bar", [_number(f.bar if f else None) for f in known])


def _own_cell(record: Record, peers: Peers) -> str:
    value = value_of(record)
    if value is None:
        return "failed" if "error" in record else NONE
    applies = peers.device in str(record.get("device", peers.device))
    ok = peers.verdict(record).get("ok") if applies else None
    return _number(value) + ("" if ok is None else " ✓" if ok else " ✗")


def _line(model: str, who: str, cells: Iterable[str]) -> str:
    return "| " + " | ".join([model, who, *cells]) + " |"


def _number(value: object) -> str:
    if not isinstance(value, int | float):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def profile_table(record: Record) -> str:
    """One decode step by kernel."""
    title = (
        f"**One decode step of {record['model']} at batch {record['batch']}:** {record['busy_us']:,.0f} µs of kernels"
        f" (mean of {record['steps']} steps; {record['wall_us']:,.0f} µs of wall time under the profiler)"
    )
    lines = [
        title,
        "",
        "| kernel | per step | µs | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kernel in record["kernels"]:
        name = str(kernel["name"]).replace("|", "\\|")
        lines.append(f"| `{name}` | {kernel['per_step']:g} | {kernel['us']:,.1f} | {100 * kernel['share']:.1f}% |")
    return "\n".join(lines)


def print_terminal_table(records: Sequence[Record], stream: TextIO) -> None:
    """The figures of this run as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="millrace bench gpu", title_justify="left", title_style="bold")
    for column in ("model", "case", "size", "Millrace", "peer", "bar", ""):
        right = column in ("size", "Millrace", "peer", "bar")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    last = ""
    for record in records:
        if record["case"] == "profile":
            continue
        if last and record["model"] != last:
            table.add_section()
        name, last = ("" if record["model"] == last else str(record["model"])), str(record["model"])
        table.add_row(name, *_terminal_cells(record))
    Console(file=stream, width=None if stream.isatty() else _PLAIN_WIDTH).print(table)


def _terminal_cells(record: Record) -> list[str]:
    size = key_of(record)[2]
    value = value_of(record)
    ok = record.get("ok")
    verdict = "" if ok is None else "[green]ok[/]" if ok else "[red]missed[/]"
    # Escape brackets, which rich would read as markup.
    remark = str(record.get("error") or record.get("skipped") or record.get("note") or "").replace("[", r"\[")
    if value is None and "plan_ms" in record:
        remark = f"planning {record['plan_ms']} ms; {remark}".rstrip("; ")
    unit = MAIN_KEYS[str(record["case"])]
    own = NONE if value is None else f"{_number(value)} {_UNITS.get(unit, 'ms')}"
    return [
        str(record["case"]), f"{size:,}" if size else "", own, _number(record.get("peer")), _number(record.get("bar")),
        " ".join(part for part in (verdict, remark) if part),
    ]  # fmt: skip
