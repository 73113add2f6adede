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

USAGE = "millrace router {ask,train,eval} DATA [options]"
EXAMPLES = """\
examples:
  millrace router ask questions.jsonl --small smollm2-135m --large qwen2.5-coder-1.5b --file answers.jsonl
      both models of a running server answer; the answers become lines for train and eval
  millrace router train answers.jsonl --file router.json        learn where the small model is good enough
  millrace router eval answers.jsonl --file router.json         cost and quality by threshold, on lines held out
  millrace router eval answers.jsonl --file router.json --plot curve.svg
  millrace router eval answers.jsonl --cascade                  the same by the small model's confidence
a question: {"messages": [...], "expected": "42", "max_tokens": 16}
a line for train and eval: {"messages": [...], "small": 0.4, "large": 1.0, "confidence": 0.7};
small and large are qualities, 0 to 1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="ask, train or eval")
    parser.add_argument("data", metavar="DATA", type=Path, help="a file with one JSON object per line")
    parser.add_argument(
        "--file", type=Path, help="the trained router (default: router.json); ask: the lines (answers.jsonl)"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="ask: the server (default: %(default)s)")
    parser.add_argument("--small", default="", metavar="MODEL", help="ask: the small model")
    parser.add_argument("--large", default="", metavar="MODEL", help="ask: the large model")
    parser.add_argument(
        "--at-once", type=int, default=8, metavar="N", help="ask: requests at once (default: %(default)s)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="Q",
        help="quality by which the small model's answer may be worse (default: 0)",
    )
    parser.add_argument(
        "--price-ratio",
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
    actions = {"ask": _ask, "train": _train, "eval": _eval}
    if args.what not in actions:
        raise UsageError(f"Unknown action '{args.what}'. Actions: ask, train, eval.")
    args.file = args.file or Path("answers.jsonl" if args.what == "ask" else "router.json")
    actions[args.what](args)
    return 0


def _ask(args: argparse.Namespace) -> None:
    from millrace.model_router.asking import ask_all, read_questions

    if not args.small or not args.large or args.at_once < 1:
        raise UsageError("`ask` needs --small MODEL and --large MODEL, and --at-once of 1 or more.")
    questions, count, right = read_questions(args.data), 0, [0.0, 0.0]
    with open(args.file, "w", encoding="utf-8") as out:
        for line in ask_all(args.url, questions, args.small, args.large, args.at_once):
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            count += 1
            right = [right[0] + line["small"], right[1] + line["large"]]
    shown = {"file": str(args.file), "questions": count, "small_right": int(right[0]), "large_right": int(right[1])}
    said = f"Wrote {args.file}: of {count} questions {right[0]:.0f} were answered right by {args.small},"
    print(json.dumps(shown) if args.json else f"{said} {right[1]:.0f} by {args.large}.")


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
