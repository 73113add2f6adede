"""The formats in which models write tool calls, and which of them a model uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.errors import ConfigError
from millrace.text.tools.shapes import HeadedShape, QuotedShape, TaggedShape

BodyKind = Literal["json", "named", "python", "headed", "tagged", "quoted", "harmony"]


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""
    is_strict: bool = False
    """Its arguments always follow the schema."""
    has_parameters: bool = True
    """False if the client sent no schema; the template then sees none."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.has_parameters:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}

    def schema_text(self) -> str:
        """The schema, which allows objects only."""
        return json.dumps({"type": "object", **self.parameters}, ensure_ascii=False)

    def parameter_names(self) -> tuple[str, ...]:
        properties = self.parameters.get("properties")
        return tuple(properties) if isinstance(properties, dict) else ()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    openings: tuple[str, ...] = ()
    """Any of these begins calls, anywhere in the answer. The first is the one that a forced call is written with."""
    close: str = ""
    """What ends the calls of one opening."""
    body: BodyKind = "json"
    bare: str = ""
    """Calls may begin the answer without an opening, with one of these characters."""
    opens_text: bool = False
    """Ordinary text has the openings too: only functions of the request are calls."""
    is_list: bool = False
    """The calls of an answer are one list."""
    name_key: str = "name"
    """Empty: a call is an object whose one key is the function's name and whose value are the arguments."""
    arguments_key: str = "arguments"
    shape: HeadedShape | TaggedShape | QuotedShape | None = None
    """How a call is written, if not as JSON or Python."""
    marks: tuple[str, ...] = ()
    """Text in a chat template that shows this format; the openings if empty."""
    also: str = ""
    """Text that a chat template of this format contains as well."""
    short_ids: bool = False
    """Templates accept only call ids of nine letters or digits."""
    answer_head: str = ""
    """What stands before an answer without calls."""
    specials: tuple[str, ...] = ()
    """Further text that may be a token of its own."""

    def is_shown_by(self, template: str) -> bool:
        signs = self.marks or self.openings
        return self.also in template and any(sign in template for sign in signs)

    @property
    def markers(self) -> tuple[str, ...]:
        """All text of this format that may be a token of its own."""
        shape = self.shape
        of_shape = () if shape is None else shape.markers
        return tuple(dict.fromkeys(text for text in (*self.openings, self.close, *of_shape, *self.specials) if text))


_DEEPSEEK_HEAD = (
    r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*"
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_FUNCTION_TAGS = TaggedShape("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", "\n")
_SOLAR = "<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call:end|>"
HARMONY_MARKERS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")


def _invoke_tags(prefix: str, *, attribute: str = "") -> TaggedShape:
    return TaggedShape(
        f'<{prefix}invoke name="', '">', f'<{prefix}parameter name="', '">', f"</{prefix}parameter>",
        f"</{prefix}invoke>", key_attribute=attribute,
    )  # fmt: skip


FORMATS: dict[str, ToolFormat] = {
    spec.name: spec
    for spec in (
        ToolFormat(
            "mistral", ("[TOOL_CALLS]",), body="named", is_list=True, short_ids=True, specials=("[ARGS]", "[CALL_ID]")
        ),
        ToolFormat(
            "harmony",
            body="harmony",
            marks=("<|channel|>commentary", "to=functions."),
            answer_head="<|channel|>final<|message|>",
            specials=HARMONY_MARKERS,
        ),
        ToolFormat(
            "deepseek_v3",
            _DEEPSEEK[:1],
            _DEEPSEEK[1],
            "headed",
            also="```json",
            shape=HeadedShape(
                _DEEPSEEK[2],
                "function<｜tool▁sep｜>",
                "\n```json\n",
                "\n```",
                _DEEPSEEK[3],
                _DEEPSEEK_HEAD,
                _DEEPSEEK[4:],
            ),
        ),
        ToolFormat(
            "deepseek_v31",
            _DEEPSEEK[:1],
            _DEEPSEEK[1],
            "headed",
            shape=HeadedShape(_DEEPSEEK[2], "", _DEEPSEEK[4], "", _DEEPSEEK[3], _DEEPSEEK_HEAD, _DEEPSEEK[4:]),
        ),
        ToolFormat(
            "deepseek_v32",
            ("<｜DSML｜function_calls>",),
            "</｜DSML｜function_calls>",
            "tagged",
            shape=_invoke_tags("｜DSML｜", attribute=r'(?: string="(?:true|false)")?'),
            specials=("｜DSML｜",),
        ),
        ToolFormat(
            "deepseek_v4",
            ("<｜DSML｜tool_calls>",),
            "</｜DSML｜tool_calls>",
            "tagged",
            shape=_invoke_tags("｜DSML｜", attribute=r'(?: string="(?:true|false)")?'),
            specials=("｜DSML｜",),
        ),
        ToolFormat(
            "step3",
            ("<｜tool_calls_begin｜>",),
            "<｜tool_calls_end｜>",
            "tagged",
            shape=TaggedShape(
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                '">',
                '<steptml:parameter name="',
                '">',
                "</steptml:parameter>",
                "</steptml:invoke><｜tool_call_end｜>",
            ),
        ),
        ToolFormat(
            "kimi_k2",
            _KIMI[:1],
            _KIMI[1],
            "headed",
            shape=HeadedShape(
                _KIMI[2],
                "functions.",
                ":{index}" + _KIMI_ARGUMENTS,
                "",
                _KIMI[3],
                r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
                (_KIMI_ARGUMENTS,),
            ),
        ),
        ToolFormat("minimax_m2", ("<minimax:tool_call>",), "</minimax:tool_call>", "tagged", shape=_invoke_tags("")),
        ToolFormat("seed_oss", ("<seed:tool_call>",), "</seed:tool_call>", "tagged", shape=_FUNCTION_TAGS),
        ToolFormat(
            "qwen3_coder",
            ("<tool_call>", "<function="),
            "</tool_call>",
            "tagged",
            marks=("<function=",),
            shape=_FUNCTION_TAGS,
        ),
        ToolFormat(
            "hy_v3",
            ("<tool_calls>",),
            "</tool_calls>",
            "tagged",
            marks=("<tool_sep>",),
            shape=TaggedShape(
                "<tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"
            ),
        ),
        ToolFormat(
            "glm45",
            ("<tool_call>",),
            "",
            "tagged",
            marks=("<arg_key>",),
            shape=TaggedShape("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
        ),
        ToolFormat(
            "solar_open2",
            ("<|tool_call:start|>",),
            "",
            "tagged",
            shape=TaggedShape("", "\n", "<|tool_arg:start|>", *_SOLAR),
        ),
        ToolFormat(
            "cohere",
            ("<|START_ACTION|>",),
            "<|END_ACTION|>",
            is_list=True,
            name_key="tool_name",
            arguments_key="parameters",
        ),
        ToolFormat(
            "minicpm5",
            ('<function name="',),
            "",
            "tagged",
            shape=TaggedShape('<function name="', '">', '<param name="', '">', "</param>", "</function>"),
        ),
        ToolFormat("apertus", ("<|tools_prefix|>",), "<|tools_suffix|>", is_list=True, name_key=""),
        ToolFormat(
            "gigachat3",
            ("function call<|role_sep|>\n", "<|function_call|>"),
            marks=("function call<|role_sep|>", "<|function_call|>"),
            specials=("<|role_sep|>",),
        ),
        ToolFormat("gemma4", ("<|tool_call>",), "<tool_call|>", "quoted", shape=QuotedShape('<|"|>')),
        ToolFormat(
            "functiongemma",
            ("<start_function_call>",),
            "<end_function_call>",
            "quoted",
            shape=QuotedShape("<escape>"),
        ),
        ToolFormat("llama3", ("<|python_tag|>",), bare="{[", arguments_key="parameters"),
        ToolFormat("llama4", ("<|python_start|>",), "<|python_end|>", body="python", bare="[", is_list=True),
        ToolFormat("lfm2", ("<|tool_call_start|>",), "<|tool_call_end|>", body="python", is_list=True),
        ToolFormat("olmo3", ("<function_calls>",), "</function_calls>", body="python"),
        ToolFormat("gemma", ("```tool_code",), "```", body="python", marks=("tool_code",)),
        ToolFormat("jamba", ("<tool_calls>",), "</tool_calls>", is_list=True),
        ToolFormat("nemotron", ("<TOOLCALL>",), "</TOOLCALL>", is_list=True),
        ToolFormat(
            "internlm",
            ("<|action_start|><|plugin|>",),
            "<|action_end|>",
            arguments_key="parameters",
            specials=("<|action_start|>", "<|plugin|>"),
        ),
        ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), is_list=True, marks=("<|tool_call|>",)),
        ToolFormat("granite_20b", ("<function_call>",), marks=("<function_call>",)),
        ToolFormat("phi4", ("functools",), is_list=True),
        ToolFormat("longcat", ("<longcat_tool_call>",), "</longcat_tool_call>"),
        ToolFormat("hermes", ("<tool_call>",), "</tool_call>"),
        ToolFormat("pythonic", (), body="python", bare="[", is_list=True),
        ToolFormat("json", ("```json",), "```", bare="{[", opens_text=True, marks=("\0",)),
    )
}
"""In the order in which a chat template is searched for them."""

DEFAULT_FORMAT = "hermes"
"""Of models whose chat template takes no tools."""

VLLM_PARSERS = {
    **dict.fromkeys(("qwen", "qwen25", "ernie45", "granite4"), "hermes"),
    **dict.fromkeys(("llama3_json", "llama4_json"), "llama3"),
    **dict.fromkeys(("qwen3_xml", "mimo", "step3p5", "nemotron_v3"), "qwen3_coder"),
    **dict.fromkeys(("glm47", "glm4_moe", "poolside_v1"), "glm45"),
    **dict.fromkeys(("hunyuan_a13b", "minimax"), "jamba"),
    **dict.fromkeys(("xlam", "openai_json"), "json"),
    **dict.fromkeys(("openai", "gpt_oss"), "harmony"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere"),
    "llama4_pythonic": "llama4",
    "granite-20b-fc": "granite_20b",
    "phi4_mini_json": "phi4",
    "nemotron_json": "nemotron",
}
"""Names of vLLM's `--tool-call-parser`, and the format that each stands for."""


def format_named(name: str) -> ToolFormat:
    """A format by its own name or by vLLM's name of its parser."""
    chosen = FORMATS.get(name) or FORMATS.get(VLLM_PARSERS.get(name, ""))
    if chosen is None:
        known = ", ".join(sorted({*FORMATS, *VLLM_PARSERS}))
        raise ConfigError(
            f"The tool format {name!r} is not known; use one of {known}, or auto to take it from the chat template.",
            param="model.tool_format",
        )
    return chosen


def detect_format(template: str, *, takes_tools: bool) -> ToolFormat:
    """The format that a chat template writes."""
    if takes_tools:
        for spec in FORMATS.values():
            if spec.is_shown_by(template):
                return spec
        if '"parameters"' in template or "'parameters'" in template:
            return FORMATS["llama3"]
        return FORMATS["json"]
    return FORMATS[DEFAULT_FORMAT]


def names_of(functions: Sequence[Function]) -> frozenset[str]:
    return frozenset(function.name for function in functions)
