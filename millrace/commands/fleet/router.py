"""`millrace router`: trains and evaluates the choice between a small and a large model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from millrace.model_router.examples import Example

USAGE = "millrace router {train,eval} DATA [options]"
EXAMPLES = """\
examples:
  millrace router train answers.jsonl --file router.json        learn where the small model is good enough
  millrace router eval answers.jsonl --file router.json         cost and quality by threshold, on lines held out
  millrace router eval answers.jsonl --file router.json --plot curve.svg
  millrace router eval answers.jsonl --cascade                  the same by the small model's confidence
each line: {"messages": [...], "small": 0.4, "large": 1.0, "confidence": 0.7}; small and large are qualities, 0 to 1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="train or eval")
    parser.add_argument("data", metavar="DATA", type=Path, help="a file with one JSON object per line")
    parser.add_argument(
        "--file", type=Path, default=Path("router.json"), help="the trained router (default: %(default)s)"
    )
    parser.add_argument(
        *("--tolerance",),
        type=float,
        default=0.0,
        metavar="Q",
        help="quality by which the small model's answer may be worse (default: 0)",
    )
    parser.add_argument(
        *("--price-ratio",),
        type=float,
        default=10.0,
        metavar="R",
        help="price of a token of the large model over that of the small one (default: 10)",
    )
    parser.add_argument("--cascade", action="store_true", help="eval: choose by the small model's confidence")
    parser.add_argument("--all", action="store_true", help="eval: use all lines, not only those held out from training")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="eval: draw the curve")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if not args.price_ratio > 0:
        raise UsageError(f"--price-ratio is {args.price_ratio:g}; it must be above 0.")
    actions = {"train": _train, "eval": _eval}
    if args.what not in actions:
        raise UsageError(f"Unknown action '{args.what}'. Actions: train, eval.")
    actions[args.what](args)
    return 0


def _train(args: argparse.Namespace) -> None:
    from millrace.model_router.classifier import save, train
    from millrace.model_router.curve import auc
    from millrace.model_router.examples import held_out, is_enough, read_examples

    examples = read_examples(args.data)
    used = [one for one in examples if not one.is_held_out]
    trained = train([one.features for one in used], [is_enough(one, args.tolerance) for one in used])
    save(trained, args.file)
    rest = held_out(examples)
    found = auc(rest, lambda one: trained.probability(one.features), args.tolerance)
    shown = {"file": str(args.file), "trained_on": len(used), "held_out": len(rest), "auc": round(found, 4)}
    said = f"Wrote {args.file}: trained on {len(used)} lines; AUC {found:.3f} on {len(rest)} held out (0.5 is chance)."
    print(json.dumps(shown) if args.json else said)


def _eval(args: argparse.Namespace) -> None:
    import msgspec

    from millrace.model_router.classifier import load
    from millrace.model_router.curve import auc, curve, plot
    from millrace.model_router.examples import held_out, read_examples
    from millrace.terminal.table import print_table

    examples = read_examples(args.data)
    if not args.all and not args.cascade:
        examples = held_out(examples)
    score: Callable[[Example], float]
    if args.cascade:
        examples = [one for one in examples if one.confidence is not None]
        score = _confidence
    else:
        classifier = load(args.file)
        score = lambda one: classifier.probability(one.features)  # noqa: E731
    if not examples:
        lacking = "a 'confidence'" if args.cascade else "part in the evaluation; use --all"
        raise UsageError(f"No line of {args.data} has {lacking}.")
    points = curve(examples, score, price_ratio=args.price_ratio, is_cascade=args.cascade)
    found = auc(examples, score, args.tolerance)
    if args.plot is not None:
        args.plot.write_text(plot(points, f"{args.data.name}: {len(examples)} requests, AUC {found:.3f}"))
    if args.json:
        print(json.dumps({"requests": len(examples), "auc": round(found, 4), "points": msgspec.to_builtins(points)}))
        return
    head = ("threshold", "to large", "cost", "quality", "random mix")
    columns = ("threshold", "large_share", "cost", "quality", "random_quality")
    rows = [tuple(f"{getattr(one, name):.3f}" for name in columns) for one in points]
    print_table([head, *rows], right=range(5))
    print(f"{len(examples)} requests; AUC {found:.3f} (0.5 is chance). Cost 1 is the large model for all.")


def _confidence(example: Example) -> float:
    assert example.confidence is not None
    return example.confidence
