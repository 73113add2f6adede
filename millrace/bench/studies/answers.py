"""What answers are worth: thinking length against accuracy, and recall of a needle against length."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.bench.studies.measured import Asked, MeasuredStudy, TimeLimit, chat_ids, need_data
from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings

BUDGETS = (0, 32, 64, 128, 256)
ANSWER = "\n\nThe final answer is: "
ANSWER_TOKENS = 8
LENGTHS, DEPTHS = (512, 1024, 2048, 4096), (0.1, 0.5, 0.9)
MODEL = "qwen2.5-coder-1.5b"
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "progress": False}


def thinking_length(asked: Asked) -> Findings:
    """Greedy reasoning is written once and cut: a smaller budget would have given the same beginning."""
    problems = _problems(asked)
    with LLM(asked.model, progress=False) as llm:
        prompts = [
            chat_ids(llm, f"{question}\nThink step by step. End with the final answer as a number.")
            for question, _ in problems
        ]
        written = [one.choices[0] for one in llm.generate(prompts, max_tokens=BUDGETS[-1], **GREEDY)]
        thoughts = [[token for token in one.token_ids if token != one.stopped_by] for one in written]
        bridge, rows = llm.tokenizer.encode(ANSWER, add_special=False), []
        for budget in BUDGETS:
            asks = [[*prompt, *thought[:budget], *bridge] for prompt, thought in zip(prompts, thoughts, strict=True)]
            replies = [one.text for one in llm.generate(asks, max_tokens=ANSWER_TOKENS, **GREEDY)]
            right = sum(first_number(reply) == answer for reply, (_, answer) in zip(replies, problems, strict=True))
            used = sum(min(budget, len(thought)) for thought in thoughts) / len(thoughts)
            rows.append((budget, used, right, 100 * right / len(problems)))
    share = [row[3] for row in rows]
    best = max(range(len(rows)), key=share.__getitem__)
    margin = 100 / len(problems) ** 0.5
    return Findings(
        ("tokens of reasoning at most", "tokens used", "right", "right %"),
        rows,
        [plot("Right answers by reasoning", [Line("right", BUDGETS, share)], "tokens", "%")],
        f"Of {len(problems)} problems {rows[0][2]} are right without reasoning and {rows[best][2]} with at most"
        f" {rows[best][0]} tokens of it. Small sample: shares are uncertain by about {margin:.0f} percentage points.",
    )


def _problems(asked: Asked) -> list[tuple[str, float]]:
    file, found = need_data(asked, "GSM8K as JSON lines with question and answer"), []
    try:
        for line in file.read_text(encoding="utf-8").splitlines()[: asked.samples]:
            record = json.loads(line)
            found.append((str(record["question"]), float(record["answer"].rpartition("####")[2].replace(",", ""))))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}. Each line must be a JSON object with question and answer, whose last line"
            " is '#### NUMBER'.",
            param="data",
        ) from error
    if not found:
        raise ConfigError(f"{file} has no problems.", param="data")
    return found


def first_number(text: str) -> float | None:
    found = re.search(r"-?\d[\d,]*(?:\.\d+)?", text)
    return None if found is None else float(found.group().replace(",", ""))


@dataclass(slots=True)
class Recall:
    """Of one length: tokens of the prompts, and numbers found at each depth, one for each text."""

    tokens: list[int] = field(default_factory=list)
    found: list[list[bool]] = field(default_factory=lambda: [[] for _ in DEPTHS])

    @property
    def percent(self) -> float:
        return 100 * sum(map(sum, self.found)) / len(self.tokens)

    def row(self, model: str, length: int) -> tuple[object, ...]:
        parts = (f"{sum(found)} of {len(found)}" for found in self.found)
        return (model, length, sum(self.tokens) / len(self.tokens), *parts, self.percent)


def needle_recall(asked: Asked) -> Findings:
    """Models share the time."""
    rows: list[tuple[object, ...]] = []
    lines, said = list[Line](), list[str]()
    for model in asked.models:
        limit = TimeLimit(asked.minutes / len(asked.models))
        with LLM(model, progress=False) as llm:
            lengths = [length for length in LENGTHS if length + 64 <= llm.max_context]
            by_length = recall_by_length(llm, asked, lengths, limit)
        rows += [one.row(model, length) for length, one in by_length.items()]
        shares = [one.percent for one in by_length.values()]
        lines.append(Line(model, list(by_length), shares, dots=len(shares) == 1))
        said.append(f"{model} finds {_said(by_length, lengths)}")
    depths = (f"found at {100 * depth:.0f}%" for depth in DEPTHS)
    return Findings(
        ("model", "length", "prompt tokens", *depths, "found %"),
        rows,
        [plot("Recall by length", lines, "tokens", "%", log_x=True)],
        " ".join(said) + " KV cache: the device's default format.",
    )


def _said(by_length: dict[int, Recall], lengths: Sequence[int]) -> str:
    shares = {length: one.percent for length, one in by_length.items()}
    ends = dict.fromkeys((min(shares), max(shares)))
    left = [f"{length:,}" for length in lengths if length not in shares]
    found = " and ".join(f"{shares[length]:.0f}% of the numbers in {length:,} tokens" for length in ends)
    return f"{found}." + (f" Too long for the time limit: {', '.join(left)}." if left else "")


def recall_by_length(llm: LLM, asked: Asked, lengths: Sequence[int], limit: TimeLimit) -> dict[int, Recall]:
    """Every length once before any length again, so that a limit costs samples before it costs lengths."""
    found: dict[int, Recall] = {}
    for sample in range(asked.samples):
        for length in lengths:
            # A token behind a longer context takes longer: half as long again, where the length doubles.
            work = length**1.5
            if not limit.fits(work):
                continue
            with limit.work(work):
                asks, parts = found_needles(llm, random.Random(f"{asked.seed} {length} {sample}"), length, 1)
            one = found.setdefault(length, Recall())
            one.tokens += map(len, asks)
            for depth, is_found in zip(one.found, parts, strict=True):
                depth.append(bool(is_found))
    return found


def found_needles(llm: LLM, draw: random.Random, length: int, samples: int) -> tuple[list[list[int]], list[int]]:
    """The prompts, and how many of `samples` numbers were found at each depth."""
    asks, numbers = [], []
    for depth in DEPTHS:
        for _ in range(samples):
            number = draw.randrange(10_000, 100_000)
            text = haystack(draw, length, depth, f"The secret number is {number}.", llm)
            asks.append(chat_ids(llm, f"{text}\n\nWhat is the secret number? Answer with the number only."))
            numbers.append(str(number))
    replies = [one.text for one in llm.generate(asks, max_tokens=12, **GREEDY)]
    found = [number in reply for number, reply in zip(numbers, replies, strict=True)]
    return asks, [sum(found[at : at + samples]) for at in range(0, len(found), samples)]


SUBJECTS = ("The miller", "A neighbour", "The old bridge", "Her brother", "The harbour", "A merchant", "The garden")
VERBS = ("looked at", "waited for", "remembered", "was near", "spoke of", "was older than", "had no need of")
OBJECTS = ("the river", "the market", "a quiet road", "the northern hills", "the evening train", "an empty barn")


def haystack(draw: random.Random, length: int, depth: float, needle: str, llm: LLM) -> str:
    """Sentences of about `length` tokens, with the needle at this share of them."""
    drawn = [f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}." for _ in range(int(length / 5))]
    sentence = len(llm.tokenizer.encode(" ".join(drawn), add_special=False)) / len(drawn)
    drawn = drawn[: int((length - 48) / sentence)]
    drawn.insert(int(depth * len(drawn)), needle)
    return " ".join(drawn)


STUDIES = {
    "thinking-length": MeasuredStudy(
        "Thinking length against accuracy",
        "How many tokens of reasoning does a small model need for school problems?",
        "The first `--samples` problems of GSM8K (`--data`); greedy reasoning, cut after a budget, then"
        f" “{ANSWER.strip()}” and {ANSWER_TOKENS} tokens, the first number of which counts.",
        MODEL,
        40,
        thinking_length,
    ),
    "needle-recall": MeasuredStudy(
        "Recall of a needle against length",
        "Does the model find one sentence in a long text?",
        "Sentences drawn at random with a number of five digits in one of them, at three depths; `--samples` texts for"
        " each length and depth, or as many as `--minutes` (shared by the models) allow, greedy answers.",
        f"smollm2-135m-instruct,{MODEL}",
        3,
        needle_recall,
        has_limit=True,
    ),
}
