"""Whole models over an FP8 KV cache: accuracy, independence of steps and prefixes, refusals, and memory saved.

Small random models in float32, so that only the cache is rounded.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.paged import PagedDriver
from helpers.quick_interpreter import quick_interpreter
from helpers.reference_ops import use_reference_ops
from helpers.small_decoder import with_paged_attention
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

from millrace.bench.gpu.models import known_shapes, make_model
from millrace.config import KvDtype, RunConfig, load_config
from millrace.engine.memory_plan import GIB, MemoryPlan, make_memory_plan
from millrace.errors import ConfigError
from millrace.models import load
from millrace.models.decoder import Decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.kv.cache import SCALE_BYTES
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.defaults import CUDA_DEFAULTS
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.device.kv_pool import allocate_kv, bytes_per_token, resolve_kv_dtype
from millrace.run.graphs.device_state import make_device_state
from millrace.run.settings import KvFormat, RunnerSettings

CPU = torch.device("cpu")
MEAN_ERROR, WORST_ERROR = 0.06, 0.25
"""Tolerance of a token's logits, relative: an FP8 item is off by 2% to 3% on average, the errors of three layers add
up, and of two experts with similar weights the other may be chosen."""
TOKENS = 48


class Fp8Driver(PagedDriver):
    """Unwritten bytes are 255: NaN as an item and as a scale."""

    def __init__(self, decoder: Decoder, block_size: int = 4) -> None:
        super().__init__(decoder, block_size)
        self.kv = [
            torch.full((*kv.shape[:4], kv.shape[4] + SCALE_BYTES), 255, dtype=torch.uint8, device=kv.device)
            for kv in self.kv
        ]


@pytest.fixture
def reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference_ops(monkeypatch)


def decoder_of(case: str, device: torch.device = CPU) -> Decoder:
    model = make_reference(case)
    spec = spec_from_config(config_of(model))
    return load.build_decoder(spec, StateDictSource.of(model), device=device, dtype=torch.float32)


@pytest.mark.usefixtures("reference_ops")
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_logits_are_close_to_those_of_the_full_cache(case: str) -> None:
    decoder = decoder_of(case)
    tokens = np.random.default_rng(4).integers(0, VOCAB, TOKENS).tolist()
    wide = PagedDriver(decoder).run(0, tokens, TOKENS)
    narrow = Fp8Driver(decoder).run(0, tokens, TOKENS)
    error = (narrow - wide).norm(dim=1) / wide.norm(dim=1)
    assert 0 < float(error.mean()) < MEAN_ERROR
    assert float(error.max()) < WORST_ERROR
    # A best token that leads by more than the error of both top logits still leads.
    best = wide.topk(2, dim=1)
    clear = best.values[:, 0] - best.values[:, 1] > 2 * (narrow - wide).abs().amax(dim=1)
    assert torch.equal(narrow.argmax(1)[clear], best.indices[clear, 0])
    assert float((narrow.argmax(1) == best.indices[:, 0]).float().mean()) >= 0.85


@pytest.mark.usefixtures("reference_ops")
def test_results_do_not_depend_on_chunking() -> None:
    decoder = decoder_of("llama")
    tokens = np.random.default_rng(5).integers(0, VOCAB, 30).tolist()
    whole = Fp8Driver(decoder).run(0, tokens, 30)
    for chunk in (1, 7):
        torch.testing.assert_close(Fp8Driver(decoder, 16).run(0, tokens, chunk), whole, atol=2e-2, rtol=2e-2)


def test_requests_with_a_shared_prefix_give_the_same_tokens(
    reference_ops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through CudaRunner; without a GPU its kernels are interpreted."""
    if interpreted:
        want_few_programs(monkeypatch)
    decoder = with_paged_attention(decoder_of("llama", place))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    sizes = {"num_blocks": 40, "block_size": 4, "max_rows": 3, "max_context": 32}
    settings = RunnerSettings(token_budget=24, kv_dtype="fp8", **sizes)
    assert {kv.dtype for kv in make_device_state(decoder, device, settings, None).kv} == {torch.uint8}
    runner = CudaRunner(decoder, device, settings)
    prompt = np.random.default_rng(6).integers(0, VOCAB, 13).astype(np.int32)
    shapes = ShapeChoice(runner.shapes)
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=40, block_size=4, max_running=3, token_budget=24, mixed_budget=24), shapes=shapes
    )
    drawn: dict[int, list[int]] = {0: [], 1: []}
    cached = []
    for index in drawn:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        scheduler.submit(Request(index, prompt, 3, row_params=RowParams(params, ())))
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            assert plan is not None
            cached.append(int(plan.starts[0]))
            with quick_interpreter() if interpreted else nullcontext():
                result = runner.launch(plan).wait()
            outcome = scheduler.apply(plan.step_no, result.drawn())
            drawn[index] += outcome.tokens.tolist()
    assert cached == [0, 13, 14, 12, 13, 14]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 3


def test_the_pool_has_one_byte_per_item_and_a_scale_per_head() -> None:
    spec = spec_from_config(config_of(make_reference("llama")))
    heads = 2 * spec.num_layers * spec.num_kv_heads
    assert bytes_per_token(spec, torch.bfloat16) == heads * 2 * spec.head_dim
    assert bytes_per_token(spec, torch.bfloat16, "fp8") == heads * (spec.head_dim + SCALE_BYTES)
    kv = allocate_kv(spec, num_blocks=3, block_size=8, dtype=torch.bfloat16, device=CPU, kv_dtype="fp8")
    assert sum(layer.nbytes for layer in kv) == 4 * 8 * bytes_per_token(spec, torch.bfloat16, "fp8")


def test_the_memory_plan_fits_nearly_twice_the_tokens() -> None:
    spec = spec_from_config(json.loads(known_shapes()["llama-3.1-8b"].read_text(encoding="utf-8")))

    def plan(kv_dtype: KvFormat) -> MemoryPlan:
        config = load_config(None, {"memory.kv_gib": 20.0}).config
        sizes = {"weights_bytes": 16 * GIB, "free_bytes": 130 * GIB}
        return make_memory_plan(config, spec, CUDA_DEFAULTS, dtype=torch.bfloat16, kv_dtype=kv_dtype, **sizes)

    assert plan("fp8").kv_tokens / plan("full").kv_tokens == pytest.approx(256 / 132, rel=1e-3)
    assert [name for name in plan("fp8").parts() if name.endswith(" tokens, fp8")]


def resolve(asked: KvDtype, head_dim: int) -> KvFormat:
    spec = dataclasses.replace(spec_from_config(config_of(make_reference("llama"))), head_dim=head_dim)
    return resolve_kv_dtype(asked, spec, dtype=torch.bfloat16, device=CPU)


def test_unsupported_combinations_are_refused_with_an_explanation() -> None:
    with pytest.raises(
        ConfigError, match=r"memory\.kv_dtype is fp8, which needs a GPU .* run on the CPU\. Set --kv-dtype"
    ):
        resolve("fp8", 64)
    with pytest.raises(ConfigError, match="kv_dtype"):
        load_config(None, {"memory.kv_dtype": "int3"})


def test_heads_of_odd_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.run.device.kv_pool.fp8_missing", lambda device: "")
    monkeypatch.setattr("millrace.run.device.kv_pool.triton_missing", lambda device: "")
    assert resolve("fp8", 80) == "fp8"
    with pytest.raises(ConfigError, match="multiples of 16 items, but the model's have 72"):
        resolve("fp8", 72)
    monkeypatch.setattr("millrace.run.device.kv_pool.triton_missing", lambda device: "needs the package triton")
    with pytest.raises(ConfigError, match="needs the package triton"):
        resolve("fp8", 80)


def test_the_benchmark_has_an_fp8_suffix() -> None:
    model = make_model("llama-3.1-8b+fp8+fp8kv", load_config(), known_shapes())
    assert model.label == "llama-3.1-8b+fp8+fp8kv"
    assert (model.config.model.quantization, model.config.memory.kv_dtype) == ("fp8", "fp8")
