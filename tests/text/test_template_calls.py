"""Chat templates and tool formats that contradict each other, and the built-in template of a model whose own does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from text.small_vocabularies import small_byte_level
from text.tools.test_parser import parsed

from millrace.commands.setup.checks import Finding, check_model
from millrace.config import Config, replace
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.resolve import ModelFiles
from millrace.text.answer_formats import choose_formats
from millrace.text.answer_parser import AnswerForm
from millrace.text.chat.template import ChatTemplate, load_chat_template
from millrace.text.template_calls import contradictions
from millrace.text.tools.formats import FORMATS, Function

SHOWN = '{% if tools %}{{ tools | tojson }}<tool_call>{"name": …}</tool_call>{% endif %}'
DOUBLED = """{% if tools %}{{ tools | tojson }}{{ '<tool_call>\\n{{"name": …}}\\n</tool_call>' }}{% endif %}"""
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_CALLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
RAISES = '{% for m in messages %}{% if m.tool_calls %}{{ raise_exception("no calls") }}{% endif %}{% endfor %}'
THINKS = CALLS.replace("[assistant]", "[assistant]<think>\n")
CODER = "qwen2.5-coder-1.5b"


def found(source: str, tool_format: str = "auto") -> list[str]:
    template = ChatTemplate({"default": source}, {})
    return contradictions(template, choose_formats(template, tool_format, "auto").tools)


@pytest.mark.parametrize("source", [SHOWN + CALLS, SHOWN + THINKS, NO_CALLS])
def test_templates_that_agree_with_their_format(source: str) -> None:
    """One may open an answer with reasoning; one takes no tools, so Millrace writes them."""
    assert found(source) == []


@pytest.mark.parametrize(
    ("source", "tool_format", "said"),
    [
        (DOUBLED + CALLS, "auto", 'doubled braces, which models copy: {{"name": …}}'),
        (SHOWN + CALLS, "json", 'as <tool_call> {"name": "get_weather", "arguments": {"city": "Paris"}}'),
        (SHOWN + CALLS, "mistral", "which the tool format 'mistral' does not read"),
        (SHOWN + NO_CALLS, "auto", "leaves calls out"),
        (SHOWN + RAISES, "auto", "no calls"),
    ],
)
def test_contradictions_are_named(source: str, tool_format: str, said: str) -> None:
    [sentence] = found(source, tool_format)
    assert said in sentence


@pytest.mark.parametrize(
    ("written", "name"),
    [
        # Markers that are put together from parts.
        (
            (
                '{% set t = "｜DSML｜" %}<{{ t }}function_calls>\n<{{ t }}invoke name="{{ c.function.name }}">\n'
                '<{{ t }}parameter name="city" string="true">{{ c.function.arguments.city }}</{{ t }}parameter>\n'
                "</{{ t }}invoke>\n</{{ t }}function_calls>"
            ),
            "deepseek_v32",
        ),
        # Another format's marker stands in the source.
        (
            (
                '{% if content == "<tool_sep>" %}{% endif %}<function name="{{ c.function.name }}">'
                '<param name="city">{{ c.function.arguments.city }}</param></function>'
            ),
            "minicpm5",
        ),
        # No format reads it: what the source suggests stays.
        ("<tool_call>{{ c.function.name }} of {{ c.function.arguments.city }}</tool_call>", "hermes"),
        ("Calling {{ c.function.name }}.", "json"),
        ('{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}', "json"),
    ],
)
def test_the_format_is_the_one_that_reads_what_the_template_writes(written: str, name: str) -> None:
    source = (
        "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{written}{{% endfor %}}{{% endfor %}}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
    )
    assert choose_formats(ChatTemplate({"default": source}, {}), "auto", "auto").tools.name == name


def test_doctor_names_them(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"

    def tools(**settings: Any) -> list[Finding]:
        config = replace(Config(), model__chat_template=str(file), **settings)
        return [finding for finding in check_model(config) if finding.subject == "tools"]

    file.write_text(SHOWN + CALLS)
    [fine] = tools()
    assert (fine.status, "hermes" in fine.text) == ("ok", True)
    file.write_text(DOUBLED + CALLS)
    both = tools(model__tool_format="json")
    assert [finding.status for finding in both] == ["warning"] * 2
    assert all("--chat-template" in finding.fix for finding in both)
    [unknown] = tools(model__tool_format="nonsense")
    assert unknown.status == "problem"


# ── the built-in template ─────────────────────────────────────────────────────────────────────────────────────────────
def coder_template(tmp_path: Path, override: str = "") -> ChatTemplate:
    """As of the known model, whose file has a template that contradicts itself."""
    tokenizer = small_byte_level()
    tokenizer.chat_templates = {"default": DOUBLED + CALLS}
    return load_chat_template(ModelFiles(CODER, "gguf", tmp_path / "x.gguf", {}, ()), tokenizer, override)


def test_a_known_model_has_a_template_that_works(tmp_path: Path) -> None:
    template = coder_template(tmp_path)
    spec = choose_formats(template, "auto", "auto").tools
    assert spec is FORMATS["json"]
    assert contradictions(template, spec) == []
    own = tmp_path / "own.jinja"
    own.write_text(SHOWN + CALLS)
    assert coder_template(tmp_path, str(own)).source == SHOWN + CALLS


def test_every_built_in_template_compiles(tmp_path: Path) -> None:
    for model in KNOWN_MODELS:
        if model.chat_template:
            files = ModelFiles(model.name, "gguf", tmp_path / "x.gguf", {}, ())
            load_chat_template(files, small_byte_level()).compile()


def test_what_the_coder_template_writes(tmp_path: Path) -> None:
    template = coder_template(tmp_path)
    functions = (Function("f"), Function("g"))
    calls = [("f", {"a": "é < 1"}), ("g", {})]
    past = [{"id": name, "type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": past},
        {"role": "tool", "content": "1", "tool_call_id": "f"},
        {"role": "tool", "content": "2", "tool_call_id": "g"},
    ]
    text = template.render(chat, tools=[function.for_template() for function in functions])
    system, user, called, results, opened = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    for function in functions:
        assert json.dumps(function.for_template()) in system
    assert user == "user\nHi<|im_end|>\n"
    turn = called.removeprefix("assistant\n").removesuffix("<|im_end|>\n")
    said, *read = parsed(AnswerForm(FORMATS["json"], functions), list(turn))
    assert said == "Well."
    assert [(name, json.loads(given)) for name, given in read] == calls  # type: ignore[misc]
    assert results.count("<tool_response>") == 2
    assert results.startswith("user\n<tool_response>\n1\n")
    assert opened == "assistant\n"
    plain = template.render(chat[1:2])
    assert "function" not in plain
    assert plain.endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_coder_template_shows_broken_arguments_as_they_were_written(tmp_path: Path) -> None:
    """The model copies what it sees of its earlier calls."""
    call = {"id": "f", "type": "function", "function": {"name": "f", "arguments": '{"session": 876'}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "failed to parse", "tool_call_id": "f"},
    ]
    text = coder_template(tmp_path).render(chat, tools=[Function("f").for_template()])
    assert '```json\n{"name": "f", "arguments": {"session": 876}\n```<|im_end|>' in text
