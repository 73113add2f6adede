"""Bad chat templates and bad messages give an error message, never a crash or a hang."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import BadRequest, ConfigError
from millrace.sources.resolve import ModelFiles
from millrace.text.chat import sandbox as template_sandbox
from millrace.text.chat.template import ChatTemplate, load_chat_template
from millrace.text.tokenizers.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def without_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only counted work stops a template."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", float("inf"))


def render(template: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate({"default": template}, {}).render(messages, **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "has a syntax error in line 1"),
        ("\n\n{{ x", "has a syntax error in line 3"),
        ("{{ raise_exception('Only users may speak.') }}", r"rejects these messages: Only users may speak\.$"),
        ("{{ messages[0].content + 1 }}", "cannot be applied to these messages: TypeError"),
        ("{{ messages[0].nothing.deeper }}", "cannot be applied to these messages: .*has no attribute"),
        ("{{ messages[3].role }}", "cannot be applied"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nothing() }}", "cannot be applied.*undefined"),
        ("{{ messages.append(1) }}", "was stopped"),
        ("{{ ''.__class__.__mro__ }}", "was stopped"),
        ("{{ messages.__class__.__base__ }}", "was stopped"),
        ("{{ raise_exception.__globals__['json'] }}", "was stopped"),
        ("{{ namespace(_x=1) }}", "was stopped"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "was stopped"),
        ("{% include 'other' %}", "cannot be applied|refuses"),
    ],
)
def test_template_errors_are_sentences(template: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        render(template)
    assert caught.value.status == 400
    assert caught.value.message.startswith("The chat template ")
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x' | center(width=1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{% for a in range(1000000000) %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for a in range(1000) %}{% for b in range(900) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    ],
)
@pytest.mark.usefixtures("without_clock")
def test_templates_that_use_too_much_are_stopped(template: str) -> None:
    with pytest.raises(BadRequest, match=r"was stopped: .*--chat-template"):
        render(template)


def test_a_slow_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    body = "{% for a in x %}{% for b in x %}{% for c in x %}{% if messages[0].role == 'z' %}{% endif %}{% endfor %}"
    with pytest.raises(BadRequest, match="it runs for more than 0.2 seconds"):
        render(body + "{% endfor %}{% endfor %}", x=list(range(1000)))


def test_limits_do_not_affect_normal_templates() -> None:
    template = (
        "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ '%5d|%s' % (7, '20240101123456') }}{{ '20240101 {:>4}'.format(1) }}{{ 7 % 4 }}"
    )
    assert render(template) == "ababab1024    7|2024010112345620240101    13"
    assert render("{{ ['a'] + ['b'] }}{{ 'x'.ljust(3) }}|{{ 'a'.replace('a', 'b') }}") == "['a', 'b']x  |b"


@pytest.mark.usefixtures("without_clock")
def test_each_rendering_has_its_own_budget() -> None:
    template = ChatTemplate({"default": "{% for a in range(900000) %}{% endfor %}done"}, {})
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: template.render(USER), range(6))) == ["done"] * 6


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is a str; it must be an object"),
        ([{"role": "user", "content": object()}], "contain a value of type object; only JSON values"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": ["bare"]}], "part of type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text parts only"),
    ],
)
def test_messages_that_cannot_be_rendered(messages: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        render("{{ messages }}", messages)


def test_messages_of_the_caller_are_not_changed() -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    before = repr(chat)
    render("{% for m in messages %}{{ m.content }}{% endfor %}", chat, continue_final_message=True)
    assert repr(chat) == before


def test_parts_are_joined_for_templates_that_read_text() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": role, "content": parts} for role in ("system", "user", "assistant", "tool")]
    assert render(template, chat) == "<system>one\ntwo<user>one\ntwo<assistant>one\ntwo<tool>one\ntwo"
    strict = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
    assert render(strict, chat[1:2]) == "<one\ntwo>"


def test_continuing_what_cannot_be_continued() -> None:
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(BadRequest, match="either starts a new turn or continues the last message"):
        render(shown, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(BadRequest, match="has no 'content' to continue"):
        render(shown, [{"role": "assistant", "content": None}], continue_final_message=True)
    with pytest.raises(BadRequest, match="names 'reasoning', which the chat template does not read"):
        render(shown, [{"role": "assistant", "reasoning": "x"}], continue_final_message="reasoning")
    with pytest.raises(BadRequest, match="changes the text of the last message"):
        render("{{ messages[0].content | upper }}", continue_final_message=True)
    with pytest.raises(BadRequest, match="is not a string"):
        render(shown, [{"role": "assistant", "content": 5}], continue_final_message=True)


def test_generation_prompt_is_added_by_default() -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<go>{% endif %}"
    assert render(template) == "Hello<go>"
    assert render(template, add_generation_prompt=False) == render(template, continue_final_message=True) == "Hello"


def test_python_objects_cannot_be_reached() -> None:
    for path in ("messages.__class__", "raise_exception.__globals__", "namespace.__init__", "''.__class__"):
        assert render("[{{ " + path + " }}]") == "[]"


def test_strftime_now() -> None:
    assert len(render("{{ strftime_now('%d %b %Y') }}")) == 11


# ── the operator's own template ───────────────────────────────────────────────────────────────────────────────────────
def files() -> ModelFiles:
    return ModelFiles("mine", "gguf", Path("mine.gguf"), {}, ())


def test_a_template_file_replaces_the_models_own(tmp_path: Path, default_tokenizer: Tokenizer) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ eos_token }}é{{ messages[0].content }}\n", encoding="utf-8")
    assert load_chat_template(files(), default_tokenizer, str(path)).render(USER) == "<|im_end|>éHello"


def test_template_files_that_cannot_be_used(tmp_path: Path, default_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.jinja cannot be read"):
        load_chat_template(files(), default_tokenizer, str(tmp_path / "nowhere.jinja"))
    path = tmp_path / "bad.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad.jinja cannot be read"):
        load_chat_template(files(), default_tokenizer, str(path))
    path.write_text("ok\n{% for %}")
    with pytest.raises(ConfigError, match=r"bad.jinja has a syntax error in line 2"):
        load_chat_template(files(), default_tokenizer, str(path))


def test_a_model_without_template(byte_level: Tokenizer) -> None:
    with pytest.raises(BadRequest, match=r"'mine' has no chat template.*/v1/completions.*--chat-template") as caught:
        load_chat_template(files(), byte_level).render(USER)
    assert caught.value.code == "no_chat_template"
