"""Renders a conversation as a prompt with the model's Jinja template, byte for byte as Hugging Face does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import meta

from millrace.errors import BadRequest, ConfigError
from millrace.sources.known_models import find_known
from millrace.text.chat.sandbox import ChatEnvironment
from millrace.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from millrace.sources.resolve import ModelFiles

Message = dict[str, Any]

DEFAULT, TOOL_USE = "default", "tool_use"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_REMEDY = "give another template with --chat-template"
_PROBE = "qxqPROBEqxq"
"""Text that templates do not change: no spaces, nothing to escape."""


class ChatTemplate:
    """A model's templates by name, compiled on first use. Thread-safe."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], model: str = "The model"
    ) -> None:
        """`special_tokens` (bos_token, eos_token, …) are variables in every template."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._model = model
        self._environment = ChatEnvironment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._takes_parts: dict[tuple[str, str], bool] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt, including special tokens; encode it with `add_special=False`.

        `add_generation_prompt` (the default) starts the assistant's turn. `continue_final_message` instead leaves the
        last message open, at the end of its content or of the given field. Text parts are passed as parts if the
        template renders them like a plain string, else joined by newlines.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "add_generation_prompt and continue_final_message are both true, but an answer either starts a new turn"
                " or continues the last message; set only one of them.",
                param="continue_final_message",
            )
        opens_turn = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        name = self._choose(tools)
        chat = _checked_messages(messages)
        for message in chat:
            self._join_parts(name, message)
        given = _plain(
            {"tools": tools, "documents": documents, **_checked_variables(variables)}, "The template variables"
        )
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        final = _tag_final(chat, field, self._templates[name]) if continue_final_message else None
        conversation = {"messages": chat, "add_generation_prompt": opens_turn}
        text = self._run(name, {**self._special_tokens, **given, **conversation})
        return text if final is None else _cut_at_tag(text, final)

    def _choose(self, tools: object) -> str:
        """Name of the template to use. Some models have a separate one for conversations with tools."""
        if not self._templates:
            raise BadRequest(
                f"{self._model} has no chat template, so it cannot answer messages. Use /v1/completions with a prompt,"
                " or start the server with --chat-template <file>.",
                param="messages",
                code="no_chat_template",
            )
        if tools is not None and TOOL_USE in self._templates:
            return TOOL_USE
        if DEFAULT in self._templates:
            return DEFAULT
        raise BadRequest(
            f"{self._model} has the chat templates {', '.join(sorted(self._templates))}, none of them 'default';"
            f" {_REMEDY}.",
            param="messages",
        )

    @property
    def source(self) -> str:
        """Source of the default template; empty if there is none."""
        return self._templates.get(DEFAULT, "")

    @cached_property
    def takes_tools(self) -> bool:
        """True if the model's template renders tools, or there is a template for conversations with tools."""
        return TOOL_USE in self._templates or "tools" in self.variables

    @cached_property
    def tool_source(self) -> str:
        """Source of the template that is used with tools."""
        return self._templates.get(TOOL_USE, self.source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the default template reads; empty if it has a syntax error."""
        try:
            return frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))
        except jinja2.TemplateSyntaxError:
            return frozenset()

    @cached_property
    def takes_system(self) -> bool:
        """False if the default template rejects system messages."""
        chat = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}]
        try:
            return _PROBE in self.render(chat)
        except BadRequest:
            return False

    def compile(self, name: str = DEFAULT) -> jinja2.Template:
        """The compiled template; raises jinja2.TemplateSyntaxError."""
        template = self._compiled.get(name)
        if template is None:
            template = self._compiled[name] = self._environment.from_string(self._templates[name])
        return template

    def _run(self, name: str, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_within_budget(self.compile(name), variables)
        except jinja2.TemplateSyntaxError as error:
            what = f"has a syntax error in line {error.lineno}: {error.message}; {_REMEDY}"
        except jinja2.exceptions.SecurityError as error:
            what = f"was stopped: {error}; {_REMEDY}"
        except jinja2.UndefinedError as error:
            what = f"cannot be applied to these messages: {error}"
        except jinja2.TemplateError as error:
            what = f"rejects these messages: {error}"
        except RecursionError:
            what = f"was stopped: its recursion is too deep; {_REMEDY}"
        except MemoryError:
            what = f"was stopped: it ran out of memory; {_REMEDY}"
        except Exception as error:  # A template's expressions can raise anything.
            what = f"cannot be applied to these messages: {type(error).__name__}: {error}"
        raise BadRequest(f"The chat template {_one_sentence(what)}", param="messages", code="chat_template_failed")

    # ── content in parts ──────────────────────────────────────────────────────────────────────────────────────────────
    def _join_parts(self, name: str, message: Message) -> None:
        """Replace content parts by one string unless the template reads parts."""
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            return
        texts = [_part_text(part) for part in content]
        role = str(message.get("role"))
        takes_parts = self._takes_parts.get((name, role))
        if takes_parts is None:
            takes_parts = self._takes_parts[name, role] = self._renders_parts(name, role)
        if not takes_parts:
            message["content"] = "\n".join(texts)

    def _renders_parts(self, name: str, role: str) -> bool:
        """True if the template renders a text part of this role like a plain string, or renders only parts."""

        def rendered(content: Any) -> str:
            probe: Message = {"role": role, "content": content}
            user = {"role": "user", "content": "x"}
            chat = {"user": [probe], "system": [probe, user], "developer": [probe, user]}.get(role, [user, probe])
            try:
                return self._run(name, {**self._special_tokens, "messages": chat, "add_generation_prompt": False})
            except BadRequest:
                return ""

        as_parts, as_text = rendered([{"type": "text", "text": _PROBE}]), rendered(_PROBE)
        return _PROBE in as_parts and (as_parts == as_text or _PROBE not in as_text)


def _one_sentence(text: str) -> str:
    text = " ".join(text.split())
    return (text if len(text) <= 500 else text[:500] + "…").removesuffix(".") + "."


# ── what goes into a template ─────────────────────────────────────────────────────────────────────────────────────────
def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    if not messages:
        raise BadRequest("messages is empty; send at least one message.", param="messages")
    chat = _plain(list(messages), "messages")
    for place, message in enumerate(chat):
        if not isinstance(message, dict):
            raise BadRequest(
                f"messages[{place}] is a {type(message).__name__}; it must be an object.", param="messages"
            )
    return [_with_reasoning(message) for message in chat]


def _with_reasoning(message: Message) -> Message:
    """Set every field name under which templates read a message's reasoning."""
    reasoning = next((message[field] for field in _REASONING_FIELDS if message.get(field) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _checked_variables(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in variables:
        if name in _RESERVED:
            raise BadRequest(f"The template variable {name!r} is reserved; remove it.", param="chat_template_kwargs")
    return variables


def _plain(value: Any, where: str) -> Any:
    """A deep copy made of plain JSON types, so that a template cannot reach or change other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    raise BadRequest(
        f"{where} contain a value of type {type(value).__name__}; only JSON values are allowed.", param="messages"
    )


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise BadRequest(
        f"A message's content has a part of type {kind!r}; this model accepts text parts only:"
        ' {"type": "text", "text": "…"}.',
        param="messages",
    )


# ── continuing the last message ───────────────────────────────────────────────────────────────────────────────────────
def _tag_final(chat: list[Message], field: str, template: str) -> str:
    """Append a tag to the text to continue, and return the text without it."""
    final = chat[-1]
    text = final.get(field)
    if text is None:
        raise BadRequest(
            f"continue_final_message is set, but the last message has no {field!r} to continue.", param="messages"
        )
    fields = [field]
    if field in _REASONING_FIELDS:
        fields = [name for name in _REASONING_FIELDS if final.get(name) == text]
    if not any(name in template for name in fields):
        raise BadRequest(
            f"continue_final_message names {field!r}, which the chat template does not read.", param="messages"
        )
    if isinstance(text, list):
        return _tag_last_part(text)
    if not isinstance(text, str):
        raise BadRequest(f"The last message's {field!r} is not a string, so it cannot be continued.", param="messages")
    for name in fields:
        final[name] = final[name] + _CONTINUE_TAG
    return text


def _tag_last_part(parts: list[Any]) -> str:
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return text
    raise BadRequest("continue_final_message is set, but the last message has no text to continue.", param="messages")


def _cut_at_tag(rendered: str, final: str) -> str:
    """The prompt up to the tag. If the template stripped the tag's trailing space, strip the text too."""
    if final.strip() not in rendered or _CONTINUE_TAG.strip() not in rendered:
        raise BadRequest(
            "continue_final_message is set, but the chat template changes the text of the last message, so it cannot be"
            " continued.",
            param="continue_final_message",
        )
    at = rendered.rindex(_CONTINUE_TAG.strip())
    is_kept = rendered[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return rendered[:at] if is_kept else rendered[:at].rstrip()


# ── finding templates ─────────────────────────────────────────────────────────────────────────────────────────────────
def load_chat_template(files: ModelFiles, tokenizer: Tokenizer, override_path: str = "") -> ChatTemplate:
    """The model's templates, the built-in one of a known model whose own does not work, or the template in
    `override_path`. If there is none, `render` raises an error."""
    if not override_path:
        known = find_known(files.name)
        templates = tokenizer.chat_templates
        if known is not None and known.chat_template:
            built_in = resources.files("millrace.text.chat") / f"{known.chat_template}.jinja"
            templates = {DEFAULT: built_in.read_text(encoding="utf-8")}
        return ChatTemplate(templates, tokenizer.special_tokens, f"The model '{files.name}'")
    path = Path(override_path).expanduser()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The chat template {path} cannot be read: {error}. Give a file with a Jinja template.",
            param="model.chat_template",
        ) from error
    template = ChatTemplate({DEFAULT: source}, tokenizer.special_tokens, f"The model '{files.name}'")
    try:
        template.compile()
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template {path} has a syntax error in line {error.lineno}: {error.message}.",
            param="model.chat_template",
        ) from error
    return template
