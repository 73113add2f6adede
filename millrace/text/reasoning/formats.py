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
    mark: str = ""
    """Text in a chat template that shows this format; the end marker if empty."""
    special: str = ""
    """What the start marker begins with, if that is a token of its own."""


FORMATS: dict[str, ReasoningFormat] = {
    spec.name: spec
    for spec in (
        ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", mark="<|channel|>analysis"),
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("think_open", "<think>", "</think>", is_open=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("solar_open2", "<|think:start|>", "<|think:end|>"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>", mark="<channel|>", special="<|channel>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}

NONE = "none"

VLLM_PARSERS = {
    **dict.fromkeys(("deepseek_r1", "step3", "step3p5"), "think_open"),
    **dict.fromkeys(("qwen3", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm45", "glm47", "ernie45"), "think"),
    **dict.fromkeys(("hunyuan_a13b", "olmo3", "minimax_m2", "kimi_k2", "holo2", "nemotron_v3", "mimo"), "think"),
    **dict.fromkeys(("deepseek_v4", "poolside_v1", "hy_v3", "minimax_m2_append_think"), "think"),
    **dict.fromkeys(("openai_gptoss", "gpt_oss", "openai"), "harmony"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere"),
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
        if (spec.mark or spec.end) in template or (not spec.mark and f"{spec.start}\\n" in template):
            return spec
    return None


def is_opened_by(spec: ReasoningFormat, prompt: str) -> bool:
    """True if the prompt ends inside the reasoning, so that the answer begins there."""
    return prompt.rstrip().endswith(spec.start)
