"""Chat templates render byte for byte as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.errors import BadRequest
from millrace.sources.gguf.reader import read_gguf
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.chat.template import ChatTemplate, load_chat_template
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " spaces \n\n kept? "}],
    [
        {"role": "system", "content": "<b>&amp;\"quoted\" 'single'</b>"},
        {"role": "user", "content": "é 中文 👍🏽 \u2028 \x00 {{ not }} {% code %} <|im_end|></s>"},
        {"role": "assistant", "content": "  padded  "},
        {"role": "user", "content": "line\r\nbreaks\n"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"t": 21}'},
        {"role": "assistant", "content": "21 degrees."},
    ],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "because"},
        {"role": "user", "content": "z", "name": "Ann"},
    ],
    [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "and go on"}],
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Météo <today> & 'tomorrow'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": TOOLS},
    {
        "add_generation_prompt": True,
        "documents": [{"title": "T", "text": "X"}],
        "enable_thinking": False,
        "date": "1 May",
    },
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": True, "bos_token": "<other>"},
]

EVERYTHING = r"""
{#- A comment -#}
{%- macro show(item, depth=0) -%}
    {%- if item is mapping -%}
        {%- for key, value in item | dictsort %}{{ '  ' * depth }}{{ key }}:{{ show(value, depth + 1) }}
        {% endfor -%}
    {%- elif item is string %}"{{ item }}"
    {%- elif item is iterable -%}[{%- for one in item %}{{ show(one) }}{{ ", " if not loop.last }}{% endfor -%}]
    {%- else %}{{ item }}{% endif -%}
{%- endmacro -%}
{{ bos_token }}{{ '%05.1f|%s' % (3.14159, 'x') }}
{% set ns = namespace(count=0, last='') %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index0 > 4 %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% set ns.last = message['role'] %}
  {{ message.role | upper | center(12) }}/{{ loop.index }}/{{ loop.cycle('a', 'b') }}
	{%- if message.content is none or not message.content %}(empty)
    {% else %}
{{ message.content | trim | replace('\n', '\\n') }}
    {%- endif +%}
    {% for call in message.tool_calls or [] %}
    {{ call.function | tojson }}{{ call.function.arguments | tojson(indent=2) }}
    {{ call | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}
    {% endfor %}
    {% if message.reasoning_content is defined %}<think>{{ message.thinking }}</think>{% endif %}
    {% generation %}
    said: {{ message.content }}
    {% endgeneration %}
{% else %}
nobody
{% endfor %}
{% if tools %}{{ show(tools) }}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{% if documents is defined and documents %}{{ documents | map(attribute='title') | join(',') }}{% endif %}
{{ ns.count }} {{ ns.last }} {{ range(3) | list }} {{ dict(a=1, b='é') | tojson }} {{ date | default('no date') }}
{{- "\n  kept\t" -}}
{% raw %}{{ raw }}{% endraw %}
{% filter upper %}shout {{ eos_token }}{% endfilter %}
{{ messages[-1].content[:3] ~ '!' if messages[-1].content else undefined_variable }}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}

"""
SIMPLE = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trims": "{% for m in messages %}\n[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}\n",
    "raises": "{% if messages[0].role != 'user' %}{{ raise_exception('Start with the user: ' ~ messages[0].role) }}"
    "{% endif %}{{ messages[0].content }}",
    "whitespace": "  {% if true %}\n  a\n  {% endif %}  \n\t{% for m in messages %}\n\t x{{ m.role }} \n"
    "{% endfor %}\n\n",
    "everything": EVERYTHING,
    "no trailing newline": "{{ messages | length }}\n",
    "strict": "{{ messages[0].content + 1 }}",
    "undefined": "{{ messages[0].nothing.at.all }}",
}


def reference(template: str | dict[str, str], special: dict[str, str]) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()), chat_template=template, **special)


def compare(ours: ChatTemplate, theirs: Any) -> int:
    """Render everything with both; both must raise or neither. Returns the number of compared texts."""
    num_equal = 0
    for chat in CHATS:
        for options in OPTIONS:
            try:
                expected = theirs.apply_chat_template(chat, tokenize=False, **options)
            except Exception:
                with pytest.raises(BadRequest):
                    ours.render(chat, **options)
            else:
                assert ours.render(chat, **options) == expected
                num_equal += 1
    return num_equal


@pytest.mark.parametrize("name", SIMPLE)
def test_handwritten_templates(name: str) -> None:
    num_equal = compare(ChatTemplate({"default": SIMPLE[name]}, SPECIAL), reference(SIMPLE[name], SPECIAL))
    assert num_equal >= (0 if name in ("strict", "undefined") else 10)


def test_the_default_models_template(default_files: ModelFiles, default_tokenizer: Tokenizer) -> None:
    ours = load_chat_template(default_files, default_tokenizer)
    theirs = reference(
        read_gguf(default_files.path).metadata["tokenizer.chat_template"], default_tokenizer.special_tokens
    )
    assert compare(ours, theirs) > 25
    assert ours.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "tinyllama-1.1b-chat"])
def test_real_templates(name: str) -> None:
    files = resolve_model(name)
    tokenizer = load_tokenizer(files)
    ours = load_chat_template(files, tokenizer)
    theirs = reference(read_gguf(files.path).metadata["tokenizer.chat_template"], tokenizer.special_tokens)
    assert compare(ours, theirs) > 25


@pytest.mark.real_models
def test_a_base_model_has_no_template() -> None:
    files = resolve_model("gemma-3-270m")
    template = load_chat_template(files, load_tokenizer(files))
    with pytest.raises(BadRequest, match=r"'gemma-3-270m' has no chat template.*/v1/completions.*--chat-template"):
        template.render([{"role": "user", "content": "Hi"}])


def test_templates_by_name() -> None:
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | tojson }}", "rag": "docs"}
    assert compare(ChatTemplate(named, SPECIAL), reference(named, SPECIAL)) > 25
    with pytest.raises(BadRequest, match="has the chat templates rag, none of them 'default'"):
        ChatTemplate({"rag": "docs"}, {}).render(CHATS[0])


@pytest.mark.parametrize(
    "content", ["Once upon", "Once upon ", "  Once\n", "", "tag CONTINUE_FINAL_MESSAGE_TAG inside"]
)
@pytest.mark.parametrize("name", ["chatml", "trims", "whitespace", "everything"])
def test_continuing_the_last_message(name: str, content: str) -> None:
    chat = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": content}]
    theirs = reference(SIMPLE[name], SPECIAL)
    ours = ChatTemplate({"default": SIMPLE[name]}, SPECIAL)
    try:
        expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    except ValueError:
        with pytest.raises(BadRequest, match="continue"):
            ours.render(chat, continue_final_message=True)
    else:
        assert ours.render(chat, continue_final_message=True) == expected


def test_continuing_the_reasoning() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content | default('') }}|{{ m.content }};{% endfor %}"
    )
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "thinking": "so far", "content": ""}]
    for field in ("thinking", "reasoning_content", "reasoning"):
        options: dict[str, Any] = {"continue_final_message": field}
        try:
            expected = reference(template, SPECIAL).apply_chat_template(chat, tokenize=False, **options)
        except ValueError:
            with pytest.raises(BadRequest):
                ChatTemplate({"default": template}, SPECIAL).render(chat, **options)
        else:
            assert ChatTemplate({"default": template}, SPECIAL).render(chat, **options) == expected


def test_content_in_parts_reaches_templates_that_read_parts() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ loop.index }}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    by_number = template.replace("{{ loop.index }}", "{{ '' if loop.length == 1 else loop.index }}")
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    expected = reference(by_number, SPECIAL).apply_chat_template(chat, tokenize=False)
    ours = ChatTemplate({"default": by_number}, SPECIAL).render(chat, add_generation_prompt=False)
    assert ours == expected == "[user]1a2b"
    only_parts = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert ChatTemplate({"default": only_parts}, SPECIAL).render(chat) == "<a><b>"
