"""Adapters in one batch: are the answers PEFT's, and what do they save against a replica each?

    python examples/adapters.py                    # makes the directory `adapters`
    python tools/adapter_study.py adapters         # --compare or --measure: one half only

Prints the answers beside those of PEFT's own model (transformers, float32), then memory and throughput of one process
with all adapters, and of as many processes with one adapter each, on the same cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "smollm2"
QUESTIONS = (
    *("What is the capital of Germany?", "What is the opposite of good?", "What does a horse say?"),
    *("What colour is a banana?", "Why is the sky blue?", "Name a river in Africa."),
)
PER_ADAPTER, TOKENS = 4, 32
"""Requests of each adapter, and tokens of each answer, while throughput is measured."""
FIXED: dict[str, Any] = {"temperature": 0.0}


def adapters_in(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/adapter_config.json"))}


def open_llm(adapters: dict[str, Path]) -> Any:
    from millrace import LLM

    return LLM(MODEL, adapters=adapters, dtype="float32", kv_tokens=8192, max_context=512)


def compare(adapters: dict[str, Path]) -> None:
    """Prints each answer, and whether PEFT's model gives the same tokens."""
    import torch
    import transformers
    from peft import PeftModel

    from millrace import SamplingParams
    from millrace.sources.resolve import resolve_model

    names = ["", *adapters]
    asked = [(name, question) for question in QUESTIONS for name in names]
    with open_llm(adapters) as llm:
        prompts = [llm.encode_chat([{"role": "user", "content": question}]) for _, question in asked]
        params = [SamplingParams(**FIXED, max_tokens=24, adapter=name) for name, _ in asked]
        found = llm.generate(prompts, params)
        ends = set(llm.tokenizer.end_token_ids)
    path = resolve_model(MODEL).path
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    oracles = {"": model.eval()}
    equal = 0
    for name in names:
        oracle = PeftModel.from_pretrained(oracles[""], adapters[name]).eval() if name else oracles[""]
        for (own, question), prompt, generation in zip(asked, prompts, found, strict=True):
            if own == name:
                wanted = greedy(oracle, prompt, 24, ends)
                same = [token for token in generation.token_ids if token not in ends] == wanted
                equal += same
                print(f"{question:32} {name or '(base)':8} {'equal' if same else 'DIFFERS'}  {generation.text!r}")
        if name:
            oracle.unload()
    print(f"{equal} of {len(asked)} answers are those of PEFT's model, token by token.")


def greedy(model: Any, prompt: list[int], count: int, ends: set[int]) -> list[int]:
    import torch

    found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=sorted(ends))
    return [token for token in found[0, len(prompt) :].tolist() if token not in ends]


def serve_part(adapters: dict[str, Path]) -> None:
    """One process of a measurement: says that it is ready, waits for a line, generates, and prints its figures."""
    from millrace import SamplingParams

    with open_llm(adapters) as llm:
        asked = [(name, index) for index in range(PER_ADAPTER) for name in adapters]
        prompts = [
            llm.encode_chat([{"role": "user", "content": f"{QUESTIONS[index]} {name}"}]) for name, index in asked
        ]
        params = [SamplingParams(**FIXED, max_tokens=TOKENS, ignore_eos=True, adapter=name) for name, _ in asked]
        llm.generate(prompts, [SamplingParams(**FIXED, max_tokens=2, adapter=name) for name, _ in asked])
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        llm.generate(prompts, params)
        elapsed = time.monotonic() - began
        memory = Path("/proc/self/smaps_rollup").read_text().split()
        pss, rss = (int(memory[memory.index(f"{kind}:") + 1]) for kind in ("Pss", "Rss"))
        print(json.dumps({"s": elapsed, "pss": pss / 1024, "rss": rss / 1024}), flush=True)
        sys.stdin.readline()


def measured(folder: Path, groups: list[list[str]]) -> tuple[float, float, float]:
    """(tokens per second, PSS and RSS in MiB) of one process for each group of adapters, at the same time."""
    command = [sys.executable, __file__, str(folder), "--part"]
    started = [
        subprocess.Popen([*command, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for names in groups
    ]
    for process in started:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            assert process.poll() is None
    began = time.monotonic()
    for process in started:
        tell(process)
    found = [json.loads(process.stdout.readline()) for process in started if process.stdout is not None]
    elapsed = time.monotonic() - began
    for process in started:
        tell(process)
    for process in started:
        process.wait(60)
    tokens = TOKENS * PER_ADAPTER * sum(map(len, groups))
    return tokens / elapsed, sum(one["pss"] for one in found), sum(one["rss"] for one in found)


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def main() -> None:
    folder, *rest = sys.argv[1:]
    adapters = adapters_in(Path(folder))
    if rest[:1] == ["--part"]:
        serve_part({name: adapters[name] for name in rest[1:]})
        return
    if rest != ["--measure"]:
        compare(adapters)
    if rest == ["--compare"]:
        return
    for _ in range(2):  # Alternating, as other work on the machine comes and goes.
        for what, groups in (("one process", [list(adapters)]), ("a process each", [[name] for name in adapters])):
            rate, pss, rss = measured(Path(folder), groups)
            print(f"{what:16} {rate:8.1f} tokens/s {pss:8.0f} MiB PSS {rss:8.0f} MiB RSS", flush=True)


if __name__ == "__main__":
    main()
