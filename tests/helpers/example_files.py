"""The files that examples read as the reader's own: traces, a profile, prices, answers of two models, a fleet."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.pages import ROOT

_PRICES = """
[[machine]]
name = "h200"
profile = "h200-8b"
dollars_per_hour = 3.5
max_replicas = 2
"""


def write_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("The sea is blue. The sky is blue.\n")
    (folder / "manual.txt").write_text("The sea is blue. The sky is blue. " * 8)
    (folder / "my.toml").write_text("[server]\nport = 8123\n")
    (folder / "prices.toml").write_text(_PRICES)
    (folder / "mine.json").write_bytes((ROOT / "millrace" / "simulate" / "profiles" / "h200-8b.json").read_bytes())
    (folder / "my.json").write_bytes((folder / "mine.json").read_bytes())
    (folder / "fleet.toml").write_bytes((ROOT / "deploy" / "fleet.toml").read_bytes())
    (folder / "config.json").write_text(json.dumps(_config()))
    rows = [f"2023-11-16 18:15:{second:02}.0000000,{200 + 7 * second},{8 + second}" for second in range(24)]
    (folder / "azure-conv.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    _write_lines(folder / "mooncake.jsonl", [_traced(number) for number in range(12)])
    _write_lines(folder / "answers.jsonl", [_answered(number) for number in range(60)])
    (folder / ".millrace-fleet").mkdir()
    events = [("ready", {}), ("ended", {"code": -9}), ("ready", {})]
    _write_lines(
        folder / ".millrace-fleet" / "events.jsonl",
        [
            {"time": 1_700_000_000 + 10 * at, "member": "r0", "event": event, **facts}
            for at, (event, facts) in enumerate(events)
        ],
    )


def _write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _traced(number: int) -> dict[str, object]:
    return {"timestamp": 500 * number, "input_length": 1200, "output_length": 20, "hash_ids": [0, 1, 2 + number]}


def _answered(number: int) -> dict[str, object]:
    is_easy = number % 3 > 0
    text = f"Spell 'sea' {number} times." if is_easy else f"Prove step by step that {number} is odd or even, and why."
    small = float(is_easy)
    return {
        "messages": [{"role": "user", "content": text}],
        "small": small,
        "large": 1.0,
        "confidence": 0.9 if is_easy else 0.3,
    }


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    }
