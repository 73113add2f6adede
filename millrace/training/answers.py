"""The target's own answers, kept in a file so that an interrupted run continues where it stopped.

Only token ids are kept: hidden states are recomputed batch by batch, which costs a forward pass and saves a thousand
times the space.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.params.sampling import SamplingParams
from millrace.training.built_in import built_in_prompts
from millrace.training.options import Reporter, TrainOptions
from millrace.training.prompts import TrainingPrompt, hold_out, read_prompts

CHUNK = 512
"""Prompts per call of the engine: bounds memory, and what an interruption loses."""
TEMPERATURE = 0.8
"""Of all answers to a prompt but the first, which is greedy."""
MAX_PROMPT_TOKENS = 1024
_MARK = "\u241f"
_FILE = "answers.jsonl"
_PROMPTS = "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    """Prompt and answer."""
    num_prompt: int
    workload: str
    is_held_out: bool


def make_answers(options: TrainOptions, open_llm: Callable[[], LLM], report: Reporter) -> list[Answer]:
    """All answers; those that `answers.jsonl` lacks are generated. The engine is started only if any are missing."""
    folder = options.output
    path = folder / _FILE
    if not options.resume and path.exists():
        raise ConfigError(
            f"{folder} holds an earlier training. Continue it with --resume, or give another --output.", param="output"
        )
    done = _read(path)
    if (folder / _PROMPTS).is_file() and done and not _missing(folder, done):
        return done
    with open_llm() as llm:
        prompts = _prompts(options, llm, report)
        jobs = _jobs(prompts, options)
        report.stage("answers", len(jobs))
        report.advance(len(done))
        with path.open("a", encoding="utf-8") as file:
            for first in range(len(done), len(jobs), CHUNK):
                answers = _answer(llm, jobs[first : first + CHUNK], options, first)
                for answer in answers:
                    row = [answer.workload, int(answer.is_held_out), answer.num_prompt, list(answer.token_ids)]
                    file.write(json.dumps(row, separators=(",", ":")) + "\n")
                file.flush()
                report.advance(len(answers))
                done += answers
    return done


def _missing(folder: Path, done: list[Answer]) -> bool:
    head = json.loads((folder / _PROMPTS).read_text(encoding="utf-8").splitlines()[0])
    return len(done) < int(head["jobs"])


def _read(path: Path) -> list[Answer]:
    """The answers of an earlier run; an unfinished last line is cut off."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    found = []
    for line in whole.splitlines():
        workload, is_held_out, num_prompt, token_ids = json.loads(line)
        found.append(Answer(tuple(token_ids), num_prompt, workload, bool(is_held_out)))
    return found


# --- prompts ---


def _prompts(options: TrainOptions, llm: LLM, report: Reporter) -> list[TrainingPrompt]:
    """The prompts, in an order that a resumed run repeats: they are kept in a file."""
    path = options.output / _PROMPTS
    if path.is_file():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        return [TrainingPrompt(tuple((r, c) for r, c in row[0]), row[1], row[2], bool(row[3])) for row in rows]
    found = built_in_prompts() if options.data is None else read_prompts(options.data)
    if options.num_prompts:
        found = hold_out(found, options.seed)[: options.num_prompts]
        found = [TrainingPrompt(prompt.messages, prompt.text, prompt.workload) for prompt in found]
    found += _own_prompts(llm, options, report)
    short = [prompt for prompt in found if len(_encode(llm, prompt)) <= MAX_PROMPT_TOKENS]
    if len(short) < len(found):
        report.say(f"{len(found) - len(short)} prompts are longer than {MAX_PROMPT_TOKENS} tokens and are left out.")
    marked = hold_out(short, options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [[prompt.messages, prompt.text, prompt.workload, int(prompt.is_held_out)] for prompt in marked]
    head = {"jobs": len(_jobs(marked, options))}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("\n".join(json.dumps(row) for row in (head, *rows)) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return marked


def _own_prompts(llm: LLM, options: TrainOptions, report: Reporter) -> list[TrainingPrompt]:
    """User messages that the target writes itself: it continues its own template where a user message begins."""
    if not options.self_prompts:
        return []
    rendered = llm.chat_template.render([{"role": "user", "content": _MARK}])
    if _MARK not in rendered:
        raise ConfigError("The chat template changes messages, so --self-prompts cannot be used.", param="self_prompts")
    start = llm.tokenizer.encode(rendered.split(_MARK)[0], add_special=False)
    report.stage("prompts", options.self_prompts)
    found: dict[str, None] = {}
    for first in range(0, options.self_prompts, CHUNK):
        count = min(CHUNK, options.self_prompts - first)
        params = [
            SamplingParams(max_tokens=160, temperature=1.0, top_p=1.0, top_k=0, seed=options.seed + first + index)
            for index in range(count)
        ]
        for generation in llm.generate([start] * count, params, progress=False):
            text = generation.text.strip()
            if generation.choices[0].finish_reason == "stop" and len(text) > 8:
                found[text] = None
        report.advance(count)
    return [TrainingPrompt((("user", text),), workload="chat") for text in found]


def _jobs(prompts: Sequence[TrainingPrompt], options: TrainOptions) -> list[tuple[TrainingPrompt, float]]:
    """(prompt, temperature): every prompt greedily, then those that are not held out again with a temperature."""
    again = [(prompt, TEMPERATURE) for prompt in prompts if not prompt.is_held_out]
    return [(prompt, 0.0) for prompt in prompts] + again * (options.answers_per_prompt - 1)


def _answer(llm: LLM, jobs: Sequence[tuple[TrainingPrompt, float]], options: TrainOptions, first: int) -> list[Answer]:
    """`first`: index of the first job among all; a job's draws depend on its index and the seed alone."""
    encoded = [_encode(llm, prompt) for prompt, _ in jobs]
    params = [
        SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=options.seed + first + index)
        for index, (_, temperature) in enumerate(jobs)
    ]
    found = []
    for (prompt, _), ids, generation in zip(jobs, encoded, llm.generate(encoded, params, progress=False), strict=True):
        choice = generation.choices[0]
        end = choice.stopped_by if isinstance(choice.stopped_by, int) else None
        tail = [] if end is None or choice.token_ids[-1:] == [end] else [end]
        found.append(Answer((*ids, *choice.token_ids, *tail), len(ids), prompt.workload, prompt.is_held_out))
    return found


def _encode(llm: LLM, prompt: TrainingPrompt) -> list[int]:
    if not prompt.messages:
        return llm.tokenizer.encode(prompt.text)
    if not llm.chat_template.source:
        return llm.tokenizer.encode(prompt.messages[-1][1])
    return llm.encode_chat([{"role": role, "content": content} for role, content in prompt.messages])
