"""The memory plan rejects what does not fit and names the setting that fixes it."""

from __future__ import annotations

import pytest
import torch

from millrace.config import Config, load_config
from millrace.engine.memory_plan import GIB, NO_DRAFTER, DrafterMemory, MemoryPlan, make_memory_plan
from millrace.errors import ConfigError, MemoryPlanError
from millrace.models.spec.families import spec_from_config
from millrace.run.device.defaults import CPU_DEFAULTS, CUDA_DEFAULTS
from millrace.run.device.device import CpuDevice
from millrace.run.drafting.device_drafts import DeviceDrafts

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def plan(
    free_gib: float,
    weights_gib: float = 2.0,
    dtype: torch.dtype = torch.bfloat16,
    step_flops: float | None = None,
    host_free_gib: float = 0.0,
    drafter: DrafterMemory = NO_DRAFTER,
    **settings: object,
) -> MemoryPlan:
    """On a CPU, or on a GPU that reaches `step_flops`."""
    config: Config = load_config(None, {key.replace("__", "."): value for key, value in settings.items()}).config
    return make_memory_plan(
        config,
        spec_from_config(LLAMA),
        CPU_DEFAULTS if step_flops is None else CUDA_DEFAULTS,
        dtype=dtype,
        weights_bytes=int(weights_gib * GIB),
        free_bytes=int(free_gib * GIB),
        step_flops=step_flops or 0.0,
        host_free_bytes=int(host_free_gib * GIB),
        drafter=drafter,
    )


def test_the_parts_add_up() -> None:
    made = plan(16.0)
    parts = made.parts()
    assert sum(parts.values()) == made.free_bytes
    assert min(parts.values()) >= 0
    assert made.kv_tokens == made.num_blocks * 16


def test_the_pool_never_exceeds_what_rows_can_use() -> None:
    assert plan(500.0, plan__max_running=4).kv_tokens == 4 * 4096


def test_the_pool_can_be_set_in_tokens() -> None:
    assert plan(16.0, memory__kv_tokens=1000).kv_tokens == 992


def test_the_error_for_weights_that_do_not_fit_names_the_remedy() -> None:
    with pytest.raises(MemoryPlanError, match="--dtype bfloat16"):
        plan(6.0, weights_gib=8.0, dtype=torch.float32)
    with pytest.raises(MemoryPlanError, match="smaller model"):
        plan(3.0, weights_gib=8.0)


def test_the_error_for_a_pool_that_does_not_fit_names_a_size_that_would() -> None:
    with pytest.raises(MemoryPlanError, match=r"--kv-gib \d+\.\d+"):
        plan(8.0, memory__kv_gib=20.0)


def test_a_context_beyond_the_model_is_rejected() -> None:
    with pytest.raises(MemoryPlanError, match="at most 4096"):
        plan(16.0, model__max_context=5000)


@pytest.mark.parametrize(("step_flops", "budget"), [(600e12, 8192), (300e12, 6144), (70e12, 2048), (0.0, 2048)])
def test_the_mixed_budget_follows_the_speed_of_the_gpu(step_flops: float, budget: int) -> None:
    assert plan(130.0, step_flops=step_flops).mixed_budget == budget


def test_blocks_in_host_memory_on_a_cpu_come_out_of_the_same_memory() -> None:
    made, without = plan(16.0, memory__kv_host_gib=2.0), plan(14.0)
    assert made.num_blocks == without.num_blocks
    assert made.host_slots == 2 * GIB // made.block_bytes
    assert sum(made.parts().values()) == 16 * GIB
    assert made.parts()[f"KV in host memory, {made.host_slots:,} blocks"] == 2 * GIB
    with pytest.raises(MemoryPlanError, match=r"15\.00 GiB, but .* 16\.00 GiB free\. Set --kv-host-gib 14"):
        plan(16.0, memory__kv_host_gib=15.0)


def test_blocks_in_host_memory_beside_a_gpu_take_only_buffers_of_it() -> None:
    made = plan(16.0, step_flops=1e14, host_free_gib=64.0, memory__kv_host_gib=32.0)
    without = plan(16.0, step_flops=1e14)
    assert made.host_slots == 32 * GIB // made.block_bytes
    assert made.activation_bytes == without.activation_bytes + 2 * made.copy_batch_bytes
    with pytest.raises(MemoryPlanError, match=r"machine has 8\.00 GiB free"):
        plan(16.0, step_flops=1e14, host_free_gib=8.0, memory__kv_host_gib=32.0)


def test_host_memory_needs_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"kv_host_gib is 1, but plan\.prefix_cache is off"):
        plan(16.0, memory__kv_host_gib=1.0, plan__prefix_cache=False)


def test_a_small_model_on_a_cpu_leaves_memory_for_others_and_says_which_setting_changes_it() -> None:
    made = plan(64.0, weights_gib=0.1)
    assert made.kv_tokens == 65_536
    (note,) = made.notes
    assert "enough for 64 requests of 1,024 tokens at once. More or less: --kv-gib or --kv-tokens." in note
    assert plan(64.0, weights_gib=0.1, memory__fraction=0.9).kv_tokens > 65_536
    assert plan(64.0, weights_gib=0.1, memory__kv_gib=1.0).notes == ()


def test_context_is_shortened_to_an_automatic_pool_with_a_reason() -> None:
    tight = plan(2.6, weights_gib=2.0)
    assert tight.max_context == tight.kv_tokens < 4096
    assert "instead of the model's 4,096, because the KV pool holds no more" in tight.notes[-1]
    assert plan(2.6, weights_gib=2.0, model__max_context=4000).max_context == 4000


SIZES = {"plan__max_running": 64, "plan__token_budget": 512, "plan__block_size": 16}


def test_a_gpu_plans_for_the_states_that_a_drafter_reads() -> None:
    """EAGLE-3 reads three states of each token, for captured and for uncaptured steps, and keeps one for each of the
    eight places of each row and of padding."""
    without = plan(64.0, step_flops=1e14, **SIZES)
    eagle3 = plan(64.0, step_flops=1e14, drafter=DrafterMemory(tap_width=3 * 2048, kept_width=2048), **SIZES)
    taps, kept = 2 * (512 + 64) * 3 * 2048 * 2, 65 * 8 * 2048 * 2
    assert eagle3.activation_bytes - without.activation_bytes == taps + kept
    assert sum(eagle3.parts().values()) == eagle3.free_bytes


def test_a_cpu_keeps_a_block_of_states_for_each_row() -> None:
    without = plan(64.0, dtype=torch.float32, **SIZES)
    eagle3 = plan(64.0, dtype=torch.float32, drafter=DrafterMemory(tap_width=3 * 2048, kept_width=2048), **SIZES)
    assert eagle3.activation_bytes - without.activation_bytes == (512 + 64) * 3 * 2048 * 4 + 64 * 17 * 2048 * 4


def test_states_that_do_not_fit_are_refused_like_activations() -> None:
    huge = DrafterMemory(tap_width=1 << 21)
    assert plan(6.0, step_flops=1e14, **SIZES).num_blocks
    with pytest.raises(MemoryPlanError, match="Lower --max-running or --token-budget"):
        plan(6.0, step_flops=1e14, drafter=huge, **SIZES)


def test_the_tokens_that_a_gpu_drafts_from_have_their_place() -> None:
    settings = {"plan__max_running": 31, "model__max_context": 2047, "memory__fraction": 0.9}
    off = plan(16.0, step_flops=1e14, **settings)
    on = plan(16.0, step_flops=1e14, plan__speculate="suffix", **settings)
    drafts = DeviceDrafts(CpuDevice(1), max_rows=31 + 1, max_context=2047, vocab_size=10, speculate="suffix")
    assert on.history_bytes == drafts.columns.history.nbytes == 32 * 2048 * 4
    assert on.history_bytes in on.parts().values()
    assert sum(on.parts().values()) == on.free_bytes
    assert off.history_bytes == plan(16.0, plan__speculate="suffix", **settings).history_bytes == 0


def test_a_gpu_reserves_memory_for_adapters() -> None:
    """64 of rank 16, a share of what is left on a small GPU, and at least one of the largest rank."""
    each = 16 * sum(3 * 2048 + 3072 + 2048 + 2048 + 2 * 2048 + 2 * 8192 + 8192 + 2048 for _ in range(16)) * 2
    large = plan(80.0, step_flops=1e15, adapters__max_adapters=64)
    assert large.adapter_bytes == large.parts()["adapters"] == 64 * each
    assert sum(large.parts().values()) == large.free_bytes
    assert plan(12.0, step_flops=1e15, adapters__max_adapters=64).adapter_bytes == int(10 * GIB * 0.1)
    one = plan(80.0, step_flops=1e15, adapters__max_adapters=1, adapters__max_lora_rank=256)
    assert one.adapter_bytes == 16 * each
    assert plan(16.0, adapters__max_adapters=64).adapter_bytes == 0
    assert plan(80.0, step_flops=1e15).adapter_bytes == 0


def test_the_pool_is_smaller_by_what_drafts_need() -> None:
    settings = {"plan__max_running": 1024, "memory__fraction": 1.0}
    off, on = (plan(16.0, step_flops=1e14, plan__speculate=name, **settings) for name in ("off", "suffix"))
    assert 0 <= off.kv_bytes - on.kv_bytes - on.history_bytes < on.block_bytes
