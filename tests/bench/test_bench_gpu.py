"""`bench gpu` on a tiny random model and a CPU: cases, figures, and tables with the peer's figures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.waiting import LIMIT_S

from millrace.bench.errors import BenchError
from millrace.bench.gpu.cases import CASES, Bench, Sizes, Unit, host_times, units
from millrace.bench.gpu.client import (
    Batch,
    EngineSession,
    Prompts,
    TimedRow,
    decode_pace,
    is_warm,
)
from millrace.bench.gpu.models import DEFAULT_MODELS, SHAPES_DIR, GpuModel, known_shapes, make_model
from millrace.bench.gpu.peer_figures import PeerFigure, load_peers
from millrace.bench.gpu.profile import kernel_times
from millrace.bench.gpu.report import markdown, profile_table, read_records
from millrace.bench.gpu.run import GpuOptions, run_models
from millrace.cli import main
from millrace.config import load_config
from millrace.errors import ConfigError
from millrace.link.engine_stats import EngineStats
from millrace.link.messages import Finish
from millrace.models.spec.families import spec_from_config

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
SMALL = Sizes(
    batches=(1, 3), decode_prompt=40, decode_output=12, ttft_prompts=(16, 2048), mixed_requests=(6, 12), mixed_low=4,
    mixed_high=12, prefix_requests=6, prefix_shared=64, prefix_own=4, prefix_output=4, host_batch=3, host_prompt=8,
    host_output=16,
)  # fmt: skip
ON_CPU = {"run.device": "cpu", "run.threads": 1, "plan.max_running": 8, "memory.kv_tokens": 4096}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    file = tmp_path / "tiny-shape.json"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    return file


def tiny_model(shape: Path, **more: object) -> GpuModel:
    loaded = load_config(None, {**ON_CPU, "server.in_process": True, **more})
    return make_model(str(shape), loaded, known_shapes())


def measure(model: GpuModel, *cases: str, sizes: Sizes = SMALL, limit_s: float = 60.0) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    options = GpuOptions(cases or CASES, sizes, seed=0, quick=False, time_limit_s=limit_s, peers=load_peers())
    asyncio.run(run_models([model], options, records.append, lambda *_: None))
    return records


def row_with(times: list[float]) -> TimedRow:
    row = TimedRow.__new__(TimedRow)
    row.times = times
    return row


# -- sizes and figures -------------------------------------------------------------------------------------------------


def test_sizes_match_the_peer_figures() -> None:
    sizes = Sizes()
    assert sizes.batches == (1, 8, 32, 128, 256)
    assert (sizes.decode_prompt, sizes.decode_output) == (512, 128)
    assert sizes.ttft_prompts == (128, 1024, 2048, 8192, 32768)
    assert (sizes.mixed_requests, sizes.mixed_low, sizes.mixed_high) == ((256, 1024), 100, 1024)
    assert (sizes.prefix_requests, sizes.prefix_shared, sizes.prefix_own, sizes.prefix_output) == (512, 2048, 64, 64)


def test_every_peer_figure_has_a_unit() -> None:
    ours = {(unit.case, unit.about.get("batch", unit.about.get("prompt", unit.about.get("requests", 0))))
            for unit in units(CASES, Sizes(), quick=False)}  # fmt: skip
    ours |= {("startup", 0)}
    assert {(figure.case, figure.at) for figure in load_peers().figures.values()} <= ours
    assert {figure.model for figure in load_peers().figures.values()} == set(DEFAULT_MODELS)


def test_scaled_sizes_stay_usable() -> None:
    small = Sizes(batches=(1, 2)).scaled(0.01)
    assert small.batches == (1, 2)
    assert small.decode_prompt == 5
    assert small.decode_output == 4
    assert small.ttft_prompts == (4, 10, 20, 82, 328)
    assert small.mixed_low <= small.mixed_high


def test_mixed_lengths_are_uniform_and_the_same_in_every_run() -> None:
    lengths, outputs = Prompts.lengths(1024, 100, 1024)
    assert (lengths, outputs) == Prompts.lengths(1024, 100, 1024)
    assert 100 <= min(lengths) < 110 < 1014 < max(lengths) <= 1024
    assert abs(sum(outputs) / 1024 - 562) < 20


def test_prompts_never_repeat_and_follow_the_seed() -> None:
    prompts = Prompts(3, 300)
    first = prompts.batch(4, 50)
    assert len({tuple(prompt) for prompt in [*first, prompts.make(50)]}) == 5
    assert Prompts(3, 300).batch(4, 50) == first
    assert all(0 <= token < 300 for prompt in first for token in prompt)


def test_decode_speed_is_measured_while_all_rows_run() -> None:
    early = row_with([0.1 * i for i in range(10)])  # 0.0 … 0.9
    late = row_with([0.5, 0.6, 0.7, 0.8, 0.9, 0.91, 0.92])  # Fast once it is alone.
    speed = decode_pace([early, late])
    assert speed.seconds_per_step == pytest.approx(0.1)
    assert speed.steps == 4
    assert speed.all_rows


def test_decode_speed_reports_a_batch_that_was_never_full() -> None:
    speed = decode_pace([row_with([0.0, 0.1]), row_with([1.0, 1.2, 1.4])])
    assert not speed.all_rows
    assert speed.seconds_per_step == pytest.approx(0.2)
    with pytest.raises(BenchError, match="at least 2 output tokens"):
        decode_pace([row_with([0.0])])


def test_batch_that_ends_early_raises() -> None:
    async def ended(reason: Any, tokens: int) -> None:
        batch = Batch([3, 3], TimedRow)
        for row in batch.rows:
            for _ in range(tokens):
                row.on_token(1, None)
            row.on_finish(Finish(id=0, reason=reason, message="why"))
        await asyncio.wait_for(batch.wait(), LIMIT_S)
        batch.check()

    asyncio.run(ended("length", 3))
    for reason, tokens in (("error", 3), ("length", 2)):
        with pytest.raises(BenchError, match="2 of 2 requests did not complete.*why"):
            asyncio.run(ended(reason, tokens))


def stats(step_no: int, **changes: float) -> EngineStats:
    values = dict.fromkeys(EngineStats.__struct_fields__, 0)
    return EngineStats(**{**values, "step_no": step_no, **changes})  # type: ignore[arg-type]


def test_host_time_is_per_step_of_every_counter() -> None:
    found = host_times(stats(10, plan_seconds=1.0, step_seconds=5.0), stats(20, plan_seconds=1.01, step_seconds=5.2))
    assert found["steps"] == 10
    assert found["plan_ms"] == pytest.approx(1.0)
    assert found["step_ms"] == pytest.approx(20.0)
    with pytest.raises(BenchError, match="did not advance"):
        host_times(stats(10), stats(10))


def test_is_warm_reads_what_the_engine_reports() -> None:
    class Capturing:
        graphs_left = 2

    class Warm:
        warm = True

    assert is_warm(None) is None
    assert is_warm(Capturing()) is False  # type: ignore[arg-type]
    assert is_warm(Warm()) is True  # type: ignore[arg-type]


def test_wait_warm_waits_for_graphs_before_the_first_report() -> None:
    reports: list[Any] = [None, None, SimpleNamespace(graphs_left=2), SimpleNamespace(graphs_left=0)]

    class Client:
        failure = None

        @property
        def stats(self) -> Any:
            return reports.pop(0) if len(reports) > 1 else reports[0]

    session: Any = SimpleNamespace(client=Client(), started_at=time.monotonic())
    assert asyncio.run(EngineSession.wait_warm(session, 5.0)) is not None
    assert len(reports) == 1, "it waits until the engine reports that no graph is left"
    session.client = SimpleNamespace(failure=None, stats=SimpleNamespace())
    assert asyncio.run(EngineSession.wait_warm(session, 5.0)) is None, "an engine that never reports graphs"


# -- which models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8.03e9),
        ("qwen3-0.6b", 0.596e9),
        ("qwen3-4b", 4.02e9),
        ("qwen3-30b-a3b", 30.5e9),
        ("smollm2-135m", 134.5e6),
    ],
)
def test_shapes_have_the_size_their_names_say(name: str, parameters: float) -> None:
    tree = json.loads((SHAPES_DIR / f"{name}.json").read_text(encoding="utf-8"))
    spec = spec_from_config(tree)
    attention = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size)
    inner = spec.inner_size if spec.moe is None else spec.moe.inner_size * spec.moe.num_experts
    router = 0 if spec.moe is None else spec.moe.num_experts * spec.hidden_size
    layers = tree["num_hidden_layers"] * (attention + 3 * spec.hidden_size * inner + router)
    embeddings = spec.vocab_size * spec.hidden_size * (1 if tree["tie_word_embeddings"] else 2)
    assert layers + embeddings == pytest.approx(parameters, rel=0.01)


def test_model_gets_the_peers_limits_and_the_users_settings(shape: Path) -> None:
    plain = make_model("llama-3.1-8b", load_config(), known_shapes())
    assert plain.label == "llama-3.1-8b"
    assert plain.config.model.source == f"random:{SHAPES_DIR / 'llama-3.1-8b.json'}"
    assert (plain.config.plan.max_running, plain.config.model.max_context) == (512, 33792)
    assert plain.config.plan.prefix_cache
    assert not plain.config.server.in_process
    own = make_model(str(shape), load_config(None, {"plan.max_running": 7}), known_shapes())
    assert own.label == "tiny-shape"
    assert (own.config.plan.max_running, own.config.model.max_context) == (7, 1024)


def test_suffixes_are_settings() -> None:
    by_suffix = make_model("qwen3-0.6b+fp8", load_config(), known_shapes())
    by_setting = make_model("qwen3-0.6b", load_config(None, {"model.quantization": "fp8"}), known_shapes())
    assert by_suffix == by_setting
    assert by_suffix.label == "qwen3-0.6b+fp8"
    assert by_suffix.config.model.quantization == "fp8"


def test_shapes_directory_adds_names(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    (tmp_path / "qwen3-0.6b.json").write_text(json.dumps(TINY), encoding="utf-8")
    shapes = known_shapes(tmp_path)
    assert make_model("mine", load_config(), shapes).label == "mine"
    assert make_model("qwen3-0.6b", load_config(), shapes).config.model.max_context == 1024
    assert "llama-3.1-8b" in shapes
    with pytest.raises(ConfigError, match="not a directory"):
        known_shapes(tmp_path / "none")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "gpt-9"], "Unknown model shape 'gpt-9'. Use one of llama-3.1-8b"),
        (
            ["--models", "qwen3-0.6b+int3"],
            "Unknown suffix '+int3' in 'qwen3-0.6b+int3'. Suffixes: +fp8, +fp8kv,",
        ),
        (["--cases", "decod"], "Unknown case 'decod'. Cases: startup, decode"),
        (["--batches", "1,x"], "--batches has 'x'"),
        (["--batches", "0"], "--batches has '0'"),
        (["--scale", "0"], "--scale is 0"),
        (["--scale", "nan"], "--scale is nan"),
        (["--time-limit", "-1"], "greater than 0"),
        (["--model", "smollm2-135m-instruct"], "use --models"),
        (["--url", "http://127.0.0.1:1"], "does not take --url"),
        (["--table", "/no/such/file"], "Cannot read /no/such/file"),
    ],
)
def test_invalid_options_are_refused_with_the_remedy(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gpu", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--quick"], ["plan", "--models", "qwen3-0.6b"], ["local", "--scale", "0.5"]])
def test_options_of_this_benchmark_are_not_ignored_by_the_others(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert "is an option of `millrace bench gpu`" in capsys.readouterr().err


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.mark.live
@pytest.mark.alone
def test_command_measures_every_case_in_its_own_engine(
    shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([
        "bench", "gpu", "--models", str(shape), "--device", "cpu", "--threads", "1", "--scale", "0.02",
        "--batches", "1,3", "--max-running", "8", "--kv-tokens", "8192", "--profile", "--quick",
    ])  # fmt: skip
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0, [record for record in records if "error" in record]
    assert {record["case"] for record in records} == {*CASES, "prefix_ttft", "profile"}
    assert all(record["engine"] == "millrace" and record["model"] == "tiny-shape" for record in records)
    assert not any("peer" in record or "bar" in record for record in records)
    assert [record["batch"] for record in records if record["case"] == "decode"] == [1, 3]
    assert {record["batch"] for record in records if record["case"] == "profile"} == {1}
    assert "tiny-shape: decode batch 3" in err
    assert "One decode step of tiny-shape at batch 1" in err
    results = tmp_path / "results.jsonl"
    results.write_text(out, encoding="utf-8")
    assert main(["bench", "gpu", "--table", str(results)]) == 0
    assert "| tiny-shape | Millrace |" in capsys.readouterr().out


def test_figures_are_consistent(shape: Path) -> None:
    records = {(record["case"], record.get("batch", record.get("requests", record.get("prompt", 0)))): record
               for record in measure(tiny_model(shape))}  # fmt: skip
    assert not [record for record in records.values() if "error" in record]
    start = records["startup", 0]
    assert 0 < start["ready_s"] <= start["seconds"]
    decode = records["decode", 3]
    assert decode["tpot_ms"] == max(decode["step_ms"], decode["tpot_diff_ms"]) > 0
    assert decode["tok_s"] == pytest.approx(3000 / decode["tpot_ms"], rel=0.01)
    assert 1 <= decode["steps"] <= 11
    mixed = records["mixed", 12]
    lengths, outputs = Prompts.lengths(12, 4, 12)
    assert (mixed["in_tok"], mixed["out_tok"]) == (sum(lengths), sum(outputs))
    assert mixed["out_tok_s"] > 0
    assert records["prefix", 6]["cached_share"] > 0.5
    assert records["prefix_ttft", 0]["warm_ms"] > 0
    assert records["host", 3]["plan_ms"] > 0
    assert records["ttft", 16]["best_ms"] <= records["ttft", 16]["ms"]
    assert "1024" in records["ttft", 2048]["skipped"]


def test_engine_that_cannot_start_gives_one_error_per_figure(shape: Path) -> None:
    shape.write_text(json.dumps({**TINY, "model_type": "abacus", "architectures": ["Abacus"]}), encoding="utf-8")
    records = measure(tiny_model(shape), "startup", "ttft")
    assert [record["case"] for record in records] == ["startup", "ttft", "ttft"]
    assert all(record["error"] for record in records)
    assert "abacus" in records[0]["error"].lower()


def run_with(
    shape: Path, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[Bench], Any], limit_s: float
) -> list[dict[str, Any]]:
    """`ttft` with a failing unit first, then a correct one."""

    def with_a_bad_one(cases: Any, sizes: Sizes, *, quick: bool) -> list[Unit]:
        return [Unit("decode", {"batch": 9}, 1, breaks), *units(["ttft"], sizes, quick=quick)]

    monkeypatch.setattr("millrace.bench.gpu.run.units", with_a_bad_one)
    return measure(tiny_model(shape), "ttft", limit_s=limit_s)


def test_figure_over_the_time_limit_fails_and_the_rest_is_measured(
    shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(bench: Bench) -> Any:
        while True:
            await bench.session.generate([bench.prompts.make(8)], 64)

    limits: list[float] = []

    def timeout(limit_s: float) -> asyncio.Timeout:
        """The first is of the engine's start, the second of the endless unit."""
        limits.append(limit_s)
        return asyncio.timeout(0.2 if len(limits) == 2 else limit_s)

    monkeypatch.setattr("millrace.bench.gpu.run.asyncio", SimpleNamespace(timeout=timeout))
    records = run_with(shape, monkeypatch, endless, LIMIT_S)
    assert set(limits) == {LIMIT_S}
    assert records[0]["error"].startswith("Not completed within 60 s")
    assert records[0]["batch"] == 9
    assert records[1]["ms"] > 0


def test_engine_that_dies_is_replaced(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[EngineSession] = []

    async def deadly(bench: Bench) -> Any:
        sessions.append(bench.session)
        bench.session.client.fail("The engine process ended with code -9.")
        await bench.session.generate([[1]], 1)

    records = run_with(shape, monkeypatch, deadly, 60.0)
    assert "code -9" in records[0]["error"]
    assert records[1]["ms"] > 0
    assert len(sessions) == 1


# -- comparison with the peer ------------------------------------------------------------------------------------------


def test_peers_carry_source_and_bars() -> None:
    peers = load_peers()
    assert "vLLM 0.26.0" in peers.source
    assert "H200" in peers.source
    first = peers.figures["llama-3.1-8b", "decode", 1]
    assert (first.peer, first.bar, first.goal) == (4.982, 4.3, 3.7)
    assert peers.figures["qwen3-0.6b", "mixed", 256].bar == 33000
    assert peers.figures["llama-3.1-8b", "startup", 0].bar == 15


def test_verdict_knows_which_way_is_better() -> None:
    peers = load_peers()
    tpot = {"model": "llama-3.1-8b", "case": "decode", "batch": 1}
    assert peers.verdict({**tpot, "tpot_ms": 4.2}) == {"peer": 4.982, "bar": 4.3, "ok": True}
    assert peers.verdict({**tpot, "tpot_ms": 4.4})["ok"] is False
    rate = {"model": "llama-3.1-8b", "case": "mixed", "requests": 1024}
    assert peers.verdict({**rate, "out_tok_s": 12600})["ok"] is True
    assert peers.verdict({**rate, "out_tok_s": 12400})["ok"] is False
    assert peers.verdict({**tpot, "error": "no"}) == {}
    assert peers.verdict({**tpot, "model": "other", "tpot_ms": 1}) == {}
    assert PeerFigure("m", "host", 256).met_by(1.0) is None
    assert PeerFigure("m", "ttft", 128, peer=9.5).met_by(9.6) is False


def test_table_joins_ours_with_the_peer(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = [
        {"model": "llama-3.1-8b", "case": "decode", "batch": 1, "tpot_ms": 9.0, "device": "NVIDIA H200"},
        {"model": "llama-3.1-8b", "case": "decode", "batch": 1, "tpot_ms": 3.91, "tpot_diff_ms": 3.91, "step_ms": 3.9,
         "device": "NVIDIA H200"},
        {"model": "llama-3.1-8b", "case": "decode", "batch": 8, "tpot_ms": 4.7, "device": "NVIDIA H200"},
        {"model": "llama-3.1-8b", "case": "decode", "batch": 32, "error": "gone"},
        {"model": "llama-3.1-8b+fp8", "case": "decode", "batch": 256, "tpot_ms": 9.25, "device": "NVIDIA H200"},
        {"model": "qwen3-0.6b", "case": "startup", "seconds": 7.5, "warm_s": 12.0, "device": "cpu, 2 threads"},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    text = markdown(read_records(file), load_peers())
    assert "| llama-3.1-8b | Millrace | 3.91 ✓ | 4.7 ✗ | failed | – | – |" in text
    assert "|  | by difference | 3.91 | – | – | – | – |" in text
    assert "|  | vLLM 0.26.0 | 4.98 | 5.26 | 5.88 | 8.68 | 14.3 |" in text
    assert "|  | bar | 4.3 | 4.6 | 5.3 | 8 | 13 |" in text
    assert "| llama-3.1-8b+fp8 | Millrace | – | – | – | – | 9.25 ✓ |" in text
    assert "| qwen3-0.6b | Millrace | 7.5 |" in text  # Another machine: no verdict.


@pytest.mark.parametrize(("line", "says"), [("nonsense", "line 2 is not JSON"), ("[1]", "has no 'case'")])
def test_table_of_invalid_records_is_refused(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(f'{{"case": "decode"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_records(file)


def test_kernels_of_a_profile_are_added_up_by_name() -> None:
    from torch._C._autograd import DeviceType

    def event(name: str, us: float, kind: Any = DeviceType.CUDA) -> Any:
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: us))

    events = [event("a", 2.0), event("b", 5.0), event("a", 4.0), event("cudaLaunchKernel", 9.0, DeviceType.CPU)]
    found = kernel_times(SimpleNamespace(events=lambda: events), is_cuda=True)
    assert [(kernel.name, kernel.count) for kernel in found] == [("a", 2), ("b", 1)]
    assert found[0].seconds == pytest.approx(6e-6)


def test_profile_is_a_table_of_kernels() -> None:
    text = profile_table({
        "model": "m", "batch": 1, "steps": 24, "busy_us": 3500.0, "wall_us": 4000.0,
        "kernels": [{"name": "a|b", "per_step": 32.0, "us": 3400.0, "share": 0.97}],
    })  # fmt: skip
    assert "| `a\\|b` | 32 | 3,400.0 | 97.0% |" in text
    assert "3,500 µs of kernels" in text
