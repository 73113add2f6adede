"""`bench serve` runs against a real server and reports correct figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.bench.http.serving import ServeBench
from millrace.bench.http.shape_model import write_shape_model
from millrace.bench.http.stack_samples import hottest, sample_processes
from millrace.cli import main
from millrace.config import DEFAULT_MODEL, Config, num_fronts, replace
from millrace.sources.resolve import resolve_model
from millrace.text.chat.template import load_chat_template
from millrace.text.tokenizers.load import load_tokenizer

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 49152,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shape")
    shape = place / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    write_shape_model(place / "model", shape, DEFAULT_MODEL)
    return place / "model"


def test_shape_model_has_the_tokenizer_and_template_of_its_source(folder: Path) -> None:
    theirs, ours = resolve_model(DEFAULT_MODEL), resolve_model(f"random:{folder}")
    expected, tokenizer = load_tokenizer(theirs), load_tokenizer(ours)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wörld 12345  it's\t日本\n"}]
    text = load_chat_template(theirs, expected, "").render(chat)
    assert load_chat_template(ours, tokenizer, "").render(chat) == text
    assert tokenizer.encode(text, add_special=False) == expected.encode(text, add_special=False)
    assert tokenizer.end_token_ids == expected.end_token_ids
    assert tokenizer.special_ids == expected.special_ids


@pytest.mark.live
@pytest.mark.alone
def test_server_under_open_streams_is_measured(folder: Path) -> None:
    options = ("--model", f"random:{folder}", "--device", "cpu", "--kv-tokens", "8192", "--fronts", "2")
    # Long enough that a late reading on a busy machine still falls into the measured time.
    bench = ServeBench(options, streams=(6,), tokens=16, seconds=4, warm_up_s=0.5, clients=2)
    said: list[str] = []
    (figures,) = bench.run(said.append)
    assert figures.errors == 0, figures.first_error
    assert figures.requests_per_s > 0
    assert figures.output_tokens_per_s > 0
    assert 0 < figures.ttft_p50_ms <= figures.ttft_p99_ms
    assert 0 < figures.burst_ttft_p50_ms <= figures.burst_ttft_p99_ms
    assert set(figures.cores) == {"engine", "front 0", "front 1", "clients"}
    assert figures.steps_per_s > 0
    assert figures.host_ms > 0
    assert 0 < figures.tokens_per_step <= 7
    assert json.loads(json.dumps(figures.record(), allow_nan=False))["streams"] == 6
    assert said[0].startswith("starting")


def test_sampled_stacks_are_counted_by_function() -> None:
    hot = hottest(["main (a.py:1);step (b.py:2) 3", "main (a.py:1);step (b.py:9);send (c.py:4) 1", "nonsense"])
    assert hot.samples == 4
    assert hot.own == (("step (b.py)", 0.75), ("send (c.py)", 0.25))
    assert dict(hot.all) == {"main (a.py)": 1.0, "step (b.py)": 1.0, "send (c.py)": 0.25}


def test_missing_py_spy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "py-spy" in sample_processes({"engine": 1}, 1.0)["engine"].problem


def test_options_of_other_benchmarks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 2
    assert main(["bench", "plan", "--profile-at", "8"]) == 2
    assert main(["bench", "serve", "--streams", "0"]) == 2
    assert "--streams" in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "fronts"), [(1, 1), (2, 1), (4, 1), (8, 3), (16, 6), (64, 8)])
def test_the_number_of_fronts_follows_the_cores(cores: int, fronts: int) -> None:
    assert num_fronts(Config(), cores) == fronts
    assert num_fronts(replace(Config(), server__fronts=2), cores) == 2
