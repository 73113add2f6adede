"""How models mark their reasoning, and which marks a model uses."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    start: str
    end: str
    is_open: bool = False
    """The answer begins inside the reasoning even if the prompt does not show it."""


FORMATS: dict[str, ReasoningFormat] = {
    spec.name: spec
    for spec in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("think_open", "<think>", "</think>", is_open=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}

NONE = "none"

VLLM_PARSERS = {
    **dict.fromkeys(("deepseek_r1", "step3"), "think_open"),
    **dict.fromkeys(("qwen3", "deepseek_v3", "glm45", "ernie45", "hunyuan_a13b", "olmo3", "minimax_m2"), "think"),
    **dict.fromkeys(("kimi_k2", "holo2", "nemotron_v3", "think"), "think"),
    "mistral": "mistral",
    "seed_oss": "seed",
    "granite": "granite",
}
"""Names of vLLM's `--reasoning-parser`, and the format that each stands for."""


def format_named(name: str) -> ReasoningFormat:
    """A format by its own name or by vLLM's name of its parser."""
    chosen = FORMATS.get(name) or FORMATS.get(VLLM_PARSERS.get(name, ""))
    if chosen is None:
        known = ", ".join(sorted({*FORMATS, *VLLM_PARSERS}))
        raise ConfigError(
            f"The reasoning format {name!r} is not known; use one of {known}, auto to take it from the chat template,"
            " or none.",
            param="model.reasoning_format",
        )
    return chosen


def detect_format(template: str) -> ReasoningFormat | None:
    """The format whose end marker the chat template contains, or None: the model does not reason."""
    for spec in FORMATS.values():
        if spec.end in template or f"{spec.start}\\n" in template:
            return spec
    return None


def is_opened_by(spec: ReasoningFormat, prompt: str) -> bool:
    """True if the prompt ends inside the reasoning, so that the answer begins there."""
    return prompt.rstrip().endswith(spec.start)
