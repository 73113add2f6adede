"""`millrace cost`: what tokens cost on a running server, and bills per tenant and day from its audit log."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.terminal.folding import folded
from millrace.terminal.server_options import add_server, ask_server

USAGE = "millrace cost [--url URL] [--price X] [--json] | millrace cost --bill AUDIT_LOG [options]"
EXAMPLES = """\
Set the machine's price with `millrace serve --price-per-hour 2.5`, or ask with --price.

examples:
  millrace cost --price 2.5                                        dollars per million tokens, largest items
  millrace cost --bill audit.jsonl --usd-input 0.2 --usd-output 1  tokens and dollars per tenant and day, as CSV"""

_NO_PRICE = "The machine has no price: ask with --price, or start the server with --price-per-hour."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument("--price", type=float, metavar="X", help="dollars per hour, instead of the server's setting")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    bill = parser.add_argument_group("bills")
    bill.add_argument("--bill", type=Path, metavar="FILE", help="audit log of `millrace serve --audit-log`")
    bill.add_argument("--format", default="csv", choices=("csv", "jsonl"), help="of the bills (default: csv)")
    for kind in ("input", "cached", "output"):
        bill.add_argument(f"--usd-{kind}", type=float, default=0.0, metavar="X", help=f"per million {kind} tokens")
    text = "per million output tokens of reasoning (default: as other output)"
    bill.add_argument("--usd-reasoning", type=float, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    if args.bill:
        return _bill(args)
    report = ask_server(args, "/v1/cost", price=args.price)
    if args.json:
        print(json.dumps(report))
    else:
        print(folded("\n".join(report_lines(report))))
    return 0


def report_lines(report: dict[str, Any]) -> list[str]:
    if report["usd_per_million"] is None:
        return [report["note"]]
    price = report["price_per_hour"]
    lines = [
        f"Over the last {report['window_s']:.0f} s the device was busy {100 * report['utilisation']:.0f}% of the time.",
        *(_token_lines(report) if price else [_NO_PRICE]),
        "largest items:",
        *(_item_line(item, price) for item in report["largest_items"]),
        "what would change:",
    ]
    for change in report["what_if"]:
        ratio = f"× {change['cost_ratio']:.2f}" if change["cost_ratio"] is not None else "unknown"
        lines.append(f"  {ratio:<8} {change['change']}: {change['why']}")
    lines += [_share_line(one, one["tenant"] or "(no tenant)", price) for one in report["tenants"]]
    lines += [_share_line(one, f"adapter {one['adapter']}", price) for one in report.get("adapters", [])]
    return lines


def _share_line(one: dict[str, Any], name: str, price: float) -> str:
    cost = f"${usd_text(one['usd'])}  " if price else ""
    return f"  {cost}{name}, {one['requests']} requests"


def _token_lines(report: dict[str, Any]) -> list[str]:
    head = f"at ${report['price_per_hour']:g}/h, $ per million"
    lines = [f"{head:<26}{'busy':>8}{'all in':>10}   95% interval (all in)"]
    for name, usd in report["usd_per_million"].items():
        low, high = map(usd_text, usd["interval"])
        lines.append(f"  {name:<24}{usd_text(usd['busy']):>8}{usd_text(usd['all_in']):>10}   {low} to {high}")
    return lines


def usd_text(value: float) -> str:
    """Three significant digits: the figures rest on a fit."""
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _item_line(item: dict[str, Any], price: float) -> str:
    cost = f"  ${usd_text(item['usd_per_hour'])}/h" if price else ""
    return f"  {item['share']:6.1%}{cost}  {item['item']}"


def _bill(args: argparse.Namespace) -> int:
    from millrace.observe.cost.billing import Prices, bills, write_bills

    reasoning = args.usd_output if args.usd_reasoning is None else args.usd_reasoning
    prices = Prices(args.usd_input, args.usd_cached, args.usd_output, reasoning)
    try:
        with args.bill.open(encoding="utf-8") as lines:
            found, broken = bills(lines, prices)
    except OSError as error:
        raise ConfigError(f"The audit log {args.bill} cannot be read: {error.strerror}.") from error
    print(write_bills(found, args.format), end="")
    if broken:
        print(f"{broken} lines of {args.bill} are not audit records and were not counted.", file=sys.stderr)
    return 1 if broken else 0
