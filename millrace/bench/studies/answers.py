"""What answers are worth: thinking length against accuracy, and recall of a needle against length."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from millrace.bench.studies.measured import Asked, MeasuredStudy, chat_ids, need_data
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


def needle_recall(asked: Asked) -> Findings:
    """Of each length and depth `samples` texts."""
    draw = random.Random(asked.seed)
    rows = []
    with LLM(asked.model, progress=False) as llm:
        lengths = [length for length in LENGTHS if length + 64 <= llm.max_context]
        for length in lengths:
            asks, parts = found_needles(llm, draw, length, asked.samples)
            mean = sum(map(len, asks)) / len(asks)
            rows.append((length, mean, *parts, 100 * sum(parts) / len(asks)))
    counts = f"of {asked.samples}"
    last = rows[-1]
    return Findings(
        ("length", "prompt tokens", *(f"found at {100 * depth:.0f}%, {counts}" for depth in DEPTHS), "found %"),
        rows,
        [plot("Recall by length", [Line("found", [row[1] for row in rows], [row[-1] for row in rows])], "tokens", "%")],
        f"{rows[0][-1]:.0f}% of the numbers are found in {rows[0][0]:,} tokens and {last[-1]:.0f}% in {last[0]:,}, with"
        f" {len(DEPTHS) * asked.samples} texts per length. KV cache: the device's default format.",
    )


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
        " each length and depth, greedy answers.",
        MODEL,
        3,
        needle_recall,
    ),
}
