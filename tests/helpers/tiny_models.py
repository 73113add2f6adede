"""Small random models of every family: as `transformers` models and as weight sources for our loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from millrace.models.spec.families import renamed, renames_of

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def _sized(kind: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return kind, {**_SIZES, **changes}


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.25, 2.5],
    "long_factor": [1.1, 2.0, 7.0],
    "original_max_position_embeddings": 96,
}

_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "shared_expert_intermediate_size": 24,
    "partial_rotary_factor": 0.5,
}
_MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "num_local_experts": 0,
    "shared_intermediate_size": 72,
    "mamba_n_heads": 6,
    "mamba_d_state": 12,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "pad_token_id": 0,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_GRANITE_MOE = {**_GRANITE, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0}
_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "q_lora_rank": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": _sized("Llama"),
    "llama_tied": _sized("Llama", tie_word_embeddings=True, num_key_value_heads=6, head_dim=8),
    "llama_bias": _sized("Llama", attention_bias=True, mlp_bias=True),
    "llama_llama3": _sized("Llama", rope_parameters=_LLAMA3),
    "llama_linear": _sized("Llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e3, "factor": 3.0}),
    "llama_dynamic": _sized("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e3, "factor": 2.0}),
    "llama_yarn": _sized("Llama", rope_parameters=_YARN),
    "llama_yarn_mscale": _sized(
        "Llama", rope_parameters={**_YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 8.0}
    ),
    "llama_gelu": _sized("Llama", hidden_act="gelu"),
    "mistral": _sized("Mistral", sliding_window=None),
    "mistral_window": _sized("Mistral", sliding_window=5),
    "qwen2": _sized("Qwen2", use_sliding_window=False),
    "qwen2_window": _sized("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": _sized("Qwen3"),
    "qwen3_heads_of_64": _sized("Qwen3", head_dim=64, num_attention_heads=2, num_key_value_heads=1),
    "qwen3_bias_tied": _sized("Qwen3", attention_bias=True, tie_word_embeddings=True),
    "olmo2": _sized("Olmo2", attention_bias=True, pad_token_id=0),
    "seed_oss": _sized("SeedOss", attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "ernie4_5": _sized("Ernie4_5", use_bias=True),
    "exaone4": _sized("Exaone4", sliding_window=6, sliding_window_pattern=2),
    "olmo3": _sized(
        "Olmo3",
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "granite": _sized(
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "gemma": _sized("Gemma"),
    "cwm": _sized("Cwm", sliding_window=6, mlp_bias=True, num_hidden_layers=5, rope_parameters=_LLAMA3),
    "ministral": _sized(
        "Ministral",
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "cohere": _sized("Cohere", head_dim=8, logit_scale=0.3, attention_bias=True, pad_token_id=0),
    "cohere2": _sized("Cohere2", sliding_window=6, sliding_window_pattern=2, logit_scale=0.3, pad_token_id=0),
    "starcoder2": _sized("Starcoder2", head_dim=8, sliding_window=7, bos_token_id=1, eos_token_id=2),
    "gpt_neox": _sized("GPTNeoX", head_dim=8),
    "gpt_neox_sequential": _sized("GPTNeoX", head_dim=8, use_parallel_residual=False, rotary_pct=1.0),
    "phi": _sized("Phi", head_dim=8),
    "stablelm": _sized("StableLm", head_dim=8, use_qkv_bias=True),
    "stablelm_parallel": _sized("StableLm", head_dim=8, use_parallel_residual=True, partial_rotary_factor=0.5),
    "nemotron": _sized("Nemotron", attention_bias=True, mlp_bias=True),
    "arcee": _sized("Arcee", attention_bias=True, mlp_bias=True),
    "hunyuan": _sized(
        "HunYuanDenseV1", rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 7.0, "factor": 1.0}
    ),
    "olmo": _sized("Olmo", head_dim=8, clip_qkv=0.6, pad_token_id=0, eos_token_id=2),
    "qwen2_moe": _sized(
        "Qwen2Moe",
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
    ),
    "olmoe": _sized("Olmoe", head_dim=8, clip_qkv=1.2, num_experts=5, num_experts_per_tok=2, pad_token_id=0),
    "dots1": _sized(
        "Dots1", **_EXPERTS, sliding_window=6, max_window_layers=2, n_group=4, topk_group=2, norm_topk_prob=True
    ),
    "glm4_moe": _sized("Glm4Moe", **_EXPERTS, use_qk_norm=True, attention_bias=True),
    "minimax_moe": _sized("MiniMaxM2", num_local_experts=5, num_experts_per_tok=2, rotary_dim=8),
    "glm4": _sized("Glm4", pad_token_id=0),
    "phi3": _sized("Phi3", sliding_window=6, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "phi3_longrope": _sized(
        "Phi3",
        head_dim=8,
        rope_parameters=_LONGROPE,
        original_max_position_embeddings=96,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "glm": _sized("Glm", pad_token_id=0, attention_bias=False, tie_word_embeddings=True),
    "smollm3": _sized("SmolLM3", num_hidden_layers=5, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "smollm3_window": _sized(
        "SmolLM3",
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=6,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gemma2": _sized(
        "Gemma2", sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=4.0
    ),
    "gemma3": _sized(
        "Gemma3Text",
        num_hidden_layers=7,
        sliding_window=6,
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    ),
    "mixtral": _sized("Mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "mixtral_window": _sized("Mixtral", num_local_experts=4, num_experts_per_tok=1, sliding_window=7),
    "qwen3_moe": _sized(
        "Qwen3Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "qwen3_moe_sparse": _sized(
        "Qwen3Moe",
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    ),
    "gpt_oss": _sized(
        "GptOss",
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=6,
        swiglu_limit=0.4,
        rope_parameters={**_YARN, "truncate": False},
    ),
    "gpt_oss_plain": _sized("GptOss", num_local_experts=4, num_experts_per_tok=4, attention_bias=False, head_dim=20),
    "qwen3_next": _sized("Qwen3Next", **_DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "qwen3_next_dense": _sized("Qwen3Next", **_DELTA, num_experts=0, tie_word_embeddings=True),
    "qwen3_5": _sized(
        "Qwen3_5Text", **{key: value for key, value in _DELTA.items() if key != "shared_expert_intermediate_size"}
    ),
    "qwen3_5_moe": _sized(
        "Qwen3_5MoeText", **_DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, attention_bias=True
    ),
    "granite_hybrid": _sized("GraniteMoeHybrid", **_MAMBA),
    "granite_hybrid_rope": _sized(
        "GraniteMoeHybrid",
        **_MAMBA | {"mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False},
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "granite_hybrid_moe": _sized(
        "GraniteMoeHybrid",
        **_MAMBA | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "granite_moe": _sized("GraniteMoe", **_GRANITE_MOE, attention_bias=True),
    "granite_moe_shared": _sized("GraniteMoeShared", **_GRANITE_MOE, shared_intermediate_size=40),
    "bamba": _sized(
        "Bamba",
        **{key: value for key, value in _MAMBA.items() if key.startswith(("mamba", "pad"))}
        | {"mamba_d_state": 12, "mamba_n_groups": 2, "attn_layer_indices": [1], "head_dim": 8},
        attention_bias=True,
        mlp_bias=True,
    ),
    "nemotron_h": _sized(
        "NemotronH",
        layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp", "mamba"],
        mamba_num_heads=6,
        mamba_head_dim=10,
        n_groups=3,
        ssm_state_size=12,
        time_step_min=0.4,
        mlp_bias=True,
        use_bias=True,
    ),
    "lfm2": _sized("Lfm2", head_dim=8, full_attn_idxs=[1], conv_bias=True, block_multiple_of=8),
    "lfm2_moe": _sized(
        "Lfm2Moe",
        head_dim=8,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v2": _sized("DeepseekV2", **_LATENT, routed_scaling_factor=1.0, n_shared_experts=1),
    "deepseek_v2_groups": _sized(
        "DeepseekV2",
        **_LATENT | {"q_lora_rank": 24},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        n_shared_experts=2,
        attention_bias=True,
        rope_parameters=_LATENT_YARN,
    ),
    "deepseek_v3": _sized(
        "DeepseekV3", **_LATENT | {"q_lora_rank": 24}, n_group=4, topk_group=2, rope_parameters=_LATENT_YARN
    ),
    "glm4_moe_lite": _sized(
        "Glm4MoeLite",
        **{key: value for key, value in _LATENT.items() if key not in ("head_dim", "first_k_dense_replace")}
        | {"q_lora_rank": 24},
    ),
    "deepseek_v3_halves": _sized(
        "DeepseekV3", **_LATENT, n_group=2, topk_group=1, rope_interleave=False, norm_topk_prob=False
    ),
}
_OFFSET = ("Gemma", "Nemotron", "Qwen3_5")
"""Families whose norms have weights of 1 + w."""
HYBRIDS = tuple(
    case
    for case in CASES
    if case.startswith(("qwen3_next", "granite_hybrid", "bamba", "lfm2", "qwen3_5", "nemotron_h"))
)
"""Cases with recurrent layers."""


def make_reference(case: str, seed: int = 0, **changes: Any) -> Any:
    """The `transformers` model in float32 with all parameters random, so that a missing norm or bias is noticed."""
    import transformers

    kind, values = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**(values | changes))
    name = f"{kind.removesuffix('Text')}ForCausalLM"
    config.architectures = [name]
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, name)(config).float().eval()
        for parameter_name, parameter in model.named_parameters():
            is_norm = parameter_name.endswith(("norm.weight", "layer_norm.weight"))
            has_offset = any(name in kind for name in _OFFSET) and kind != "NemotronH"
            centre = 1.0 if is_norm and not has_offset else 0.0
            torch.nn.init.normal_(parameter, centre, 0.3 if is_norm else 0.15)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("correction_bias", "expert_bias")):
                torch.nn.init.normal_(buffer, 0.0, 0.3)
        for module in model.modules():
            if hasattr(module, "limit"):  # a constant in transformers 5.17, whatever the config says
                module.limit = getattr(config, "swiglu_limit", 7.0)  # Older transformers have it in the module alone.
    return model


def config_of(model: Any) -> dict[str, Any]:
    return dict(model.config.to_dict())


class StateDictSource:
    """A WeightSource over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor], path: Path = Path("/models/tiny/model.safetensors")) -> None:
        self.tensors = tensors
        self.path = path

    @classmethod
    def of(cls, model: Any) -> StateDictSource:
        tensors: dict[str, torch.Tensor] = {}
        renames = renames_of(config_of(model))
        for name, tensor in model.state_dict().items():
            for own, part in _as_stored(renamed(name, renames), tensor.detach(), model.config.model_type):
                tensors[own] = part
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        return cls(tensors)

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensors[name].to(device=device, dtype=dtype, copy=True)

    def file_of(self, name: str) -> Path:
        return self.path


def _as_stored(name: str, tensor: torch.Tensor, model_type: str) -> Iterable[tuple[str, torch.Tensor]]:
    """Experts are stacked in memory and separate in checkpoints."""
    base, _, own = name.rpartition(".")
    is_mixtral = model_type == "mixtral"
    if is_mixtral:
        base = base.replace(".mlp.", ".block_sparse_moe.")
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    if not base.endswith(".experts"):
        return [(name, tensor)]
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    end = "bias" if own.endswith("_bias") else "weight"
    own = own.removesuffix("_bias")
    found = []
    for expert, whole in enumerate(tensor):
        if model_type == "gpt_oss" and end == "weight":
            whole = whole.t()
        halves = (whole[::2], whole[1::2]) if model_type == "gpt_oss" else whole.chunk(2)
        parts = {gate: halves[0], up: halves[1]} if own == "gate_up_proj" else {down: whole}
        found += [(f"{base}.{expert}.{part}.{end}", value.contiguous()) for part, value in parts.items()]
    return found
