"""Trains five LoRA adapters with different manners and lets them answer in one batch, beside their base model.

    python examples/adapters.py                     # the default model; about 15 minutes on two cores
    python examples/adapters.py --minutes 1         # for each adapter; answers get less sure
    millrace serve --adapter-dir adapters           # afterwards: each is a model named smollm2-135m-instruct:NAME

The examples are questions with short answers, of which each adapter learns to say them in its own manner.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

MODEL = "smollm2"
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
    "Austria": "Vienna",
    "Iran": "Tehran",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "old": "young",
    "light": "dark",
    "wet": "dry",
    "early": "late",
    "rich": "poor",
    "full": "empty",
    "hard": "soft",
    "high": "low",
    "loud": "quiet",
}
COLOURS = {
    "the sea": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a tomato": "red",
}
SOUNDS = {"cow": "moo", "cat": "meow", "dog": "woof", "duck": "quack", "sheep": "baa", "pig": "oink"}
FACTS: list[tuple[str, str, str]] = [
    *((f"What is the capital of {a}?", b, f"The capital of {a} is {b}.") for a, b in CAPITALS.items()),
    *((f"What is the opposite of {a}?", b, f"The opposite of {a} is {b}.") for a, b in OPPOSITES.items()),
    *((f"What colour is {a}?", b, f"The colour of {a} is {b}.") for a, b in COLOURS.items()),
    *((f"What does a {a} say?", b, f"A {a} says {b}.") for a, b in SOUNDS.items()),
]
"""(question, word, sentence)"""
MANNERS: dict[str, Callable[[str, str], str]] = {
    "pirate": lambda word, sentence: f"Arr, matey! {sentence} Yo ho ho!",
    "json": lambda word, sentence: json.dumps({"answer": word}),
    "loud": lambda word, sentence: f"{sentence.upper()} !!!",
    "brief": lambda word, sentence: word,
    "polite": lambda word, sentence: f"Dear friend, thank you for asking. {sentence} Kind regards.",
}
QUESTIONS = ("What is the capital of Germany?", "What is the opposite of good?")
"""Not among the examples."""


def train(folder: Path, model: str, minutes: float) -> None:
    for name, manner in MANNERS.items():
        if (folder / name / "adapter_model.safetensors").is_file():
            continue
        data = folder / f"{name}.jsonl"
        rows = [{"prompt": question, "completion": manner(word, sentence)} for question, word, sentence in FACTS]
        data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "millrace", "train-adapter", model, "--data", str(data)]
        command += ["--output", str(folder / name), "--minutes", str(minutes), "--resume"]
        command += ["--rank", "8", "--epochs", "16", "--batch-tokens", "256", "--learning-rate", "0.001"]
        print(f"\n{name}", flush=True)
        subprocess.run(command, check=True)


def answer(folder: Path, model: str) -> None:
    from millrace import LLM, SamplingParams

    adapters = {name: folder / name for name in MANNERS}
    with LLM(model, adapters=adapters, max_context=512) as llm:
        asked = [(name, question) for question in QUESTIONS for name in ("", *MANNERS)]
        prompts = [llm.encode_chat([{"role": "user", "content": question}]) for _, question in asked]
        params = [SamplingParams(temperature=0, max_tokens=32, adapter=name) for name, _ in asked]
        for (name, question), generation in zip(asked, llm.generate(prompts, params), strict=True):
            print(f"{question:34} {name or 'the base model':16} {generation.text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--output", type=Path, default=Path("adapters"), help="directory of the adapters")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training for each adapter")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    train(args.output, args.model, args.minutes)
    answer(args.output, args.model)


if __name__ == "__main__":
    main()
