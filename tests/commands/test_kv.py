"""`millrace kv`: its numbers are those of the engine's pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import config_of, make_reference

from millrace.cli import main
from millrace.commands.library.kv import request_bytes
from millrace.config import load_config
from millrace.engine.memory_plan import GIB, PADDING_STATES, make_memory_plan
from millrace.models.spec.families import spec_from_config
from millrace.plan.kv.groups import KvGroups
from millrace.run.device.defaults import CPU_DEFAULTS
from millrace.run.device.kv_pool import allocate_kv
from millrace.run.settings import KvFormat

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
GEMMA = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "sliding_window": 64}


HYBRID = config_of(make_reference("granite_hybrid", head_dim=64))


@pytest.mark.parametrize("config", [LLAMA, GEMMA, HYBRID], ids=["one group", "windows", "recurrent"])
@pytest.mark.parametrize(
    ("shown", "dtype", "stored"),
    [
        ("float32", torch.float32, "full"),
        ("bfloat16", torch.bfloat16, "full"),
        ("float16", torch.float32, "float16"),
        ("int8", torch.bfloat16, "int8"),
        ("int4", torch.bfloat16, "int4"),
    ],
)
def test_a_request_takes_what_the_engine_plans_and_allocates(
    config: dict[str, Any], shown: str, dtype: torch.dtype, stored: KvFormat
) -> None:
    spec, places = spec_from_config(config), 3
    blocks = KvGroups(spec.kv_groups.windows).blocks_for(500, 16)
    settings = load_config(None, {"memory.kv_gib": 0.5, "plan.max_running": 5}).config
    plan = make_memory_plan(
        settings,
        spec,
        CPU_DEFAULTS,
        dtype=dtype,
        kv_dtype=stored,
        weights_bytes=0,
        free_bytes=4 * GIB,
        state_places=places,
    )
    expected = blocks * plan.block_bytes + plan.states.row_bytes // (5 + PADDING_STATES)
    assert request_bytes(spec, shown, 500, 16, places) == expected
    device = torch.device("cpu")
    pool = allocate_kv(spec, num_blocks=blocks, block_size=16, dtype=dtype, device=device, kv_dtype=stored)
    scratch = sum(one.nbytes for one in pool) // (blocks + 1)  # a block beside those of the requests
    assert sum(one.nbytes for one in pool) - scratch == blocks * plan.block_bytes


def test_what_fits_is_shown_for_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert main(["kv", str(path), "--context", "1024", "--memory-gb", "2", "--weights-gb", "1.0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    sizes = {one["kv_dtype"]: one for one in shown["formats"]}
    token_bytes = 2 * 3 * 64 * 2  # keys and values, layers, one head, bfloat16
    assert (sizes["bfloat16"]["bytes_per_token"], sizes["bfloat16"]["bytes_per_request"]) == (
        token_bytes,
        1024 * token_bytes,
    )
    assert sizes["bfloat16"]["requests_by_memory"] == {"2 GB": 800_000_000 // (1024 * token_bytes)}
    svg = tmp_path / "memory.svg"
    assert main(["kv", str(path), "--svg", str(svg), "--memory-gb", "2"]) == 0
    assert {name for name in ("float32", "90% of 2 GB") if name in svg.read_text()} == {"float32", "90% of 2 GB"}
    capsys.readouterr()
    assert main(["kv", str(path)]) == 0
    text = capsys.readouterr().out
    assert "3 layers with 1 KV heads of 64" in text
    assert max(map(len, text.splitlines()[1:])) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "'nosuch' is not on this machine. Give its config.json"),
        (["CONFIG", "--context", "9999"], "--context is 9,999, but the model takes 1 to 4,096 tokens."),
        (["CONFIG", "--requests", "0"], "--requests is 0; give a number above 0."),
        (["CONFIG", "--drafts", "-1"], "--drafts is -1; give 0 or more."),
        (["BAD"], "is not a JSON file"),
    ],
)
def test_wrong_use_ends_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"CONFIG": tmp_path / "config.json", "BAD": tmp_path / "bad.json"}
    paths["CONFIG"].write_text(json.dumps(LLAMA))
    paths["BAD"].write_text("{")
    assert main(["kv", *(str(paths.get(one, one)) for one in arguments)]) != 0
    assert said in " ".join(capsys.readouterr().err.split())
