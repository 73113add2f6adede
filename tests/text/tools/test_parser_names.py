"""The names of vLLM's parsers: each is a format of Millrace."""

from __future__ import annotations

import pytest

from millrace.errors import ConfigError
from millrace.text.reasoning import formats as reasoning
from millrace.text.reasoning.formats import ReasoningFormat
from millrace.text.reasoning.preamble import preamble
from millrace.text.tools import formats as tools

TOOLS = """apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 ernie45
functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b hy_v3
internlm jamba kimi_k2 lfm2 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2
mistral olmo3 openai phi4_mini_json poolside_v1 pythonic qwen3_coder qwen3_xml seed_oss solar_open2 step3 step3p5
xlam""".split()
REASONING = """cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 glm47 granite
holo2 hunyuan_a13b hy_v3 kimi_k2 mimo minimax_m2 minimax_m2_append_think mistral nemotron_v3 olmo3
openai_gptoss poolside_v1 qwen3 seed_oss solar_open2 step3 step3p5""".split()


@pytest.mark.parametrize("name", TOOLS)
def test_tool_parsers(name: str) -> None:
    assert tools.format_named(name) in tools.FORMATS.values()


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_parsers(name: str) -> None:
    assert reasoning.format_named(name) in reasoning.FORMATS.values()


@pytest.mark.parametrize("format_named", [tools.format_named, reasoning.format_named])
def test_other_names_are_refused_with_the_list(format_named: object) -> None:
    for name in ("no_such_parser", "kimi_k3", "minimax_m3", "inkling"):
        with pytest.raises(ConfigError, match=f"{name}.*hy_v3.*solar_open2"):
            format_named(name)  # type: ignore[operator]


def test_a_start_marker_may_begin_with_a_special_token() -> None:
    spec: ReasoningFormat = reasoning.FORMATS["gemma4"]
    special = {"<|channel>": 7, "<channel|>": 8}.get
    assert '<[7]> "thought\\n"' in preamble(spec, special, is_open=False)
