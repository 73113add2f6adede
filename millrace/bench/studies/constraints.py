"""What constraints to JSON cost, what they give, and how they go with drafts."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import msgspec

from millrace.bench.studies.measured import Asked, MeasuredStudy, chat_ids, ratio_of_medians
from millrace.llm import LLM
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings

AT_ONCE, MAX_TOKENS = 100, 64
NAMES = ("Mary Stone", "Omar Haddad", "Ines Pereira", "Jonas Lindqvist", "Aiko Tanaka", "Peter Novak")
CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Busan", "Tallinn")


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    age: int
    city: str


class Contact(msgspec.Struct, forbid_unknown_fields=True):
    full_name: str
    years_of_age: int
    city_of_residence: str
    preferred_language: str
    is_available_on_weekdays: bool


def json_answers(asked: Asked) -> Findings:
    """Groups with and without the constraint take turns."""
    prompt = "Mary Stone is 34 years old and lives in Lisbon. Answer with a JSON object with name, age and city, only."
    kinds: dict[str, Any] = {"none": None, "schema": Person}
    counts: dict[str, list[int]] = {kind: [0, 0, 0] for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with LLM(asked.model, progress=False) as llm:
        ids = chat_ids(llm, prompt)
        for schema in kinds.values():  # Compiles the schema.
            llm.generate([ids], schema=schema, max_tokens=2, progress=False)
        for group in range(-(-asked.samples // AT_ONCE)):
            size = min(AT_ONCE, asked.samples - group * AT_ONCE)
            for kind in list(kinds)[:: 1 if group % 2 == 0 else -1]:
                told: dict[str, Any] = {"temperature": 0.7, "max_tokens": MAX_TOKENS, "seed": asked.seed + group}
                began = time.perf_counter()
                (done,) = llm.generate([ids], schema=kinds[kind], n=size, progress=False, **told)
                seconds[kind].append(time.perf_counter() - began)
                for choice in done.choices:
                    counts[kind][0] += is_valid(Person, choice.text)
                    counts[kind][1] += is_valid(dict, choice.text)
                    counts[kind][2] += choice.num_tokens
    rows = []
    for kind, (valid, is_json, tokens) in counts.items():
        shares = 100 * valid / asked.samples, 100 * is_json / asked.samples
        rows.append(
            (kind, *shares, tokens / asked.samples, tokens / sum(seconds[kind]), asked.samples / sum(seconds[kind]))
        )
    free, held = rows
    lines = [
        Line("objects of the schema", (0, 1), [free[1], held[1]]),
        Line("JSON objects", (0, 1), [free[2], held[2]]),
    ]
    return Findings(
        ("constraint", "of the schema %", "JSON objects %", "tokens each", "tokens/s", "answers/s"),
        rows,
        [plot("Share of answers, without and with the constraint", lines, "constraint", "%")],
        f"Of {asked.samples:,} answers to one prompt {free[1]:.1f}% fit the schema without a constraint and"
        f" {held[1]:.1f}% with it (what is missing was cut at {MAX_TOKENS} tokens). With the constraint there are"
        f" {held[4] / free[4]:.2f} times as many tokens and {held[5] / free[5]:.2f} times as many answers per second.",
    )


def is_valid(kind: Any, text: str) -> bool:
    try:
        msgspec.json.decode(text.strip(), type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True


def drafts_with_grammars(asked: Asked) -> Findings:
    """Two engines, one with drafts; greedy answers one at a time, so a difference would be a defect."""
    kinds = [(drafts, schema) for schema in (None, Contact) for drafts in ("off", "auto")]
    seconds: dict[tuple[str, Any], list[float]] = {kind: [] for kind in kinds}
    answers: dict[tuple[str, Any], list[list[int]]] = {kind: [] for kind in kinds}
    engines = {name: LLM(asked.model, progress=False, speculate=name, max_running=1) for name in ("off", "auto")}
    try:
        prompts = [chat_ids(engines["off"], _contact(number)) for number in range(asked.samples)]
        for drafts, schema in kinds:
            engines[drafts].generate([prompts[0]], schema=schema, temperature=0.0, max_tokens=8, progress=False)
        for number, prompt in enumerate(prompts):
            for drafts, schema in kinds if number % 2 == 0 else kinds[::-1]:
                began = time.perf_counter()
                (done,) = engines[drafts].generate(
                    [prompt], schema=schema, temperature=0.0, max_tokens=2 * MAX_TOKENS, progress=False
                )
                seconds[drafts, schema].append((time.perf_counter() - began) / max(1, done.num_tokens))
                answers[drafts, schema].append(done.token_ids)
    finally:
        for llm in engines.values():
            llm.close()
    rows, gains = list[tuple[object, ...]](), dict[Any, float]()
    for drafts, schema in kinds:
        gain = ratio_of_medians(seconds["off", schema], seconds[drafts, schema])
        gains[schema] = gain
        tokens = sum(map(len, answers[drafts, schema])) / asked.samples
        same = sum(one == other for one, other in zip(answers[drafts, schema], answers["off", schema], strict=True))
        rows.append(
            (drafts, "none" if schema is None else "schema", 1e3 * median(seconds[drafts, schema]), gain, tokens, same)
        )
    lines = [
        Line(f"drafts {drafts}", (0, 1), [1e3 * median(seconds[drafts, schema]) for schema in (None, Contact)])
        for drafts in ("off", "auto")
    ]
    equal = sum(int(str(row[5])) for row in rows)
    return Findings(
        (
            "drafts",
            "constraint",
            "ms per token",
            "times as fast",
            "tokens each",
            "answers as without drafts",
        ),
        rows,
        [plot("Time per token, without and with a schema", lines, "schema", "ms")],
        f"Drafts give {gains[None]:.2f} times the speed on free answers and {gains[Contact]:.2f} times on answers held"
        f" to a schema, whose keys are forced. {equal} of {4 * asked.samples} answers are those without drafts.",
    )


def _contact(number: int) -> str:
    name, city = NAMES[number % len(NAMES)], CITIES[(5 * number + 1) % len(CITIES)]
    return (
        f"{name} is {23 + 3 * number} years old, lives in {city}, prefers to speak English and is free on"
        " weekdays. Answer with a JSON object with full_name, years_of_age, city_of_residence, preferred_language and"
        " is_available_on_weekdays, only."
    )


STUDIES = {
    "json-answers": MeasuredStudy(
        "JSON with and without a constraint, many answers to one prompt",
        "How many answers fit a schema, and what does the constraint cost?",
        f"`--samples` answers at temperature 0.7, {AT_ONCE} at once, at most {MAX_TOKENS} tokens; both take turns.",
        "smollm2-135m-instruct",
        1000,
        json_answers,
    ),
    "drafts-grammars": MeasuredStudy(
        "Drafts with grammars",
        "Do drafts pay on answers that a grammar holds to a schema?",
        "`--samples` prompts, one at a time, greedy; drafts off and `auto`, with and without a schema, in turns.",
        "smollm2-135m-instruct",
        16,
        drafts_with_grammars,
    ),
}
