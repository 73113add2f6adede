"""Documents reused at other places of a prompt: what it saves and what it loses, by recomputed share."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from millrace.bench.studies.answers import haystack
from millrace.bench.studies.measured import Asked, MeasuredStudy, ratio_of_medians
from millrace.llm import LLM
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings

DOCUMENTS, SHOWN, LENGTH, ANSWER_TOKENS = 8, 5, 200, 24
"""Documents, how many of them a question comes with, tokens of each, and tokens of an answer at most."""
SHARES = (0.0, 0.15, 0.3, 0.6, None)
"""Recomputed shares; None: nothing is marked, and everything is computed."""
PLACES = ("Harwell", "Dunmore", "Alston", "Wickham", "Selby", "Thorney", "Marlow", "Kelso")
FIRST_NAMES = ("Thomas", "Anna", "Peter", "Clara", "Henry", "Ruth", "John", "Mary")
LAST_NAMES = ("Reed", "Fields", "Holm", "Stone", "Ward", "Baker", "Lane", "Hill")
PEOPLE = tuple(map(" ".join, zip(FIRST_NAMES, LAST_NAMES, strict=True)))


@dataclass
class _Measured:
    first_s: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    right: int = 0


def documents(asked: Asked) -> Findings:
    """A sample is a question with documents in an order of its own."""
    draw = random.Random(asked.seed)
    measured = {share: _Measured() for share in SHARES}
    with LLM(asked.model, progress=False, speculate="off") as llm:
        texts = [_document(llm, draw, place, who) for place, who in zip(PLACES, PEOPLE, strict=True)]
        warm = _messages(texts, "Warm up.", "Hello?", 0.0)
        llm.chat(warm, temperature=0.0, max_tokens=1)
        for number in range(asked.samples):
            shown = draw.sample(range(DOCUMENTS), SHOWN)
            about, opening = draw.choice(shown), f"Passages of search {number + 100}:"
            question = f"Who built the mill of {PLACES[about]}?"
            answers = {}
            for share in SHARES:  # The exact one last: its prefix stays cached, and an exact prefix goes first.
                messages = _messages([texts[one] for one in shown], opening, question, share)
                own, began = measured[share], time.perf_counter()
                reused = llm.chat(messages, temperature=0.0, max_tokens=1).document_tokens
                own.first_s.append(time.perf_counter() - began)
                found = llm.chat(messages, temperature=0.0, max_tokens=ANSWER_TOKENS)
                own.reused.append(reused / found.num_prompt_tokens)
                own.right += PEOPLE[about] in found.text
                own.losses += _losses(llm, messages, f"The mill of {PLACES[about]} was built by {PEOPLE[about]}.")
                answers[share] = found.text.split()
            for share in SHARES:
                measured[share].overlaps.append(overlap(answers[share], answers[None]))
    return _findings(asked, measured)


def _document(llm: LLM, draw: random.Random, place: str, who: str) -> str:
    """The fact stands behind what is recomputed of most shares."""
    fact = f"The mill of {place} was built by {who}."
    return f"About {place}. " + haystack(draw, LENGTH + 48, 0.7, fact, llm)


def _messages(texts: Sequence[str], opening: str, question: str, share: float | None) -> list[dict[str, Any]]:
    mark = {} if share is None else {"cache": {"type": "document", "recompute": share}}
    parts: list[dict[str, Any]] = [{"type": "text", "text": opening}]
    parts += [{"type": "text", "text": text, **mark} for text in texts]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": f"{question} Answer in one sentence."}]}]


def _losses(llm: LLM, messages: list[dict[str, Any]], answer: str) -> list[float]:
    """Of each token of the right answer, after this prompt."""
    found = llm.chat(messages, temperature=0.0, max_tokens=4 * ANSWER_TOKENS, choice=[answer], logprobs=0)
    return [-one.logprob for one in found.choices[0].logprobs or ()]


def overlap(words: Sequence[str], others: Sequence[str]) -> float:
    """F1 of two texts' words."""
    common = sum((Counter(words) & Counter(others)).values())
    return 2 * common / max(1, len(words) + len(others))


def _findings(asked: Asked, measured: dict[float | None, _Measured]) -> Findings:
    whole, rows = measured[None], []
    for share, own in measured.items():
        rows.append(
            (
                "everything" if share is None else f"{100 * share:.0f}% of each document",
                100 * fmean(own.reused),
                1e3 * median(own.first_s),
                ratio_of_medians(own.first_s, whole.first_s),
                math.exp(fmean(own.losses)),
                100 * fmean(own.overlaps),
                own.right,
            )
        )
    ratios, losses = [float(row[3]) for row in rows], [float(row[4]) for row in rows]
    usual = rows[SHARES.index(0.15)]
    return Findings(
        (
            "computed in its place",
            "reused % of the prompt",
            "first token, ms",
            "against everything",
            "perplexity of the right answer",
            "words as without reuse, %",
            f"right of {asked.samples}",
        ),
        rows,
        [
            plot(
                "Perplexity of the right answer by time",
                [Line("shares", ratios, losses, dots=True)],
                "of a prefill",
                "",
            )
        ],
        f"With {usual[0]} computed in its place the first token comes after {usual[3]:.2f} of the time of a whole"
        f" prefill; the perplexity of the right answer is {usual[4]:.2f}, {losses[-1]:.2f} with everything computed and"
        f" {losses[0]:.2f} with nothing.",
    )


STUDIES = {
    "documents": MeasuredStudy(
        "Documents reused at other places",
        "What does reuse of documents that are no prefix save, and what does it cost in quality?",
        f"{SHOWN} of {DOCUMENTS} documents of about {LENGTH} tokens in random order before a question about one of"
        " them; `--samples` questions. The documents were computed before. Times are those of an answer of one token.",
        "smollm2-135m-instruct",
        8,
        documents,
    )
}
