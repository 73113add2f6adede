"""A conversation and its slash commands. Text in, text out: no terminal."""

from __future__ import annotations

import base64
import difflib
import json
import mimetypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.errors import MillraceError
from millrace.terminal.sampling_options import check_fields

Message = dict[str, Any]
"""Content is text, or a list of parts in OpenAI's form where images are attached."""
MAX_IMAGE_BYTES = 20 << 20
_SETTABLE: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    **dict.fromkeys(("top_k", "seed", "max_tokens"), int),
}

HELP = '''\
/help                show this list
/clear               clear the conversation (keeps the system prompt)
/system [TEXT]       show or set the system prompt; "/system -" removes it
/set [NAME VALUE]    show or set sampling: temperature, top_p, top_k, min_p,
                     repetition_penalty, seed, max_tokens; "-" lets the model
                     choose
/model [NAME]        show the model, or go on with another one
/retry               answer the last message again (also /regenerate)
/save FILE           save the conversation, as JSON if FILE ends in .json,
                     else as text; "/save! FILE" overwrites a file
/load FILE           continue a conversation that was saved as JSON
/image FILE          attach an image to the next message, for models that see
/stats               show tokens and times of the last answer
/exit                exit (also Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer. Pasted lines are one message. For several lines, begin
and end with """ or end a line with \\ to continue on the next one.'''


@dataclass(slots=True)
class Conversation:
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    """Data URLs that the next message carries."""

    @property
    def messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def add_user_message(self, text: str) -> None:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.images.clear()
        self.turns.append({"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text})

    def attach(self, path: Path) -> str:
        """Attach an image to the next message. Returns what to say."""
        kind = mimetypes.guess_type(path.name)[0] or ""
        if not kind.startswith("image/"):
            return f"{path} is not an image by its name; use a .png, .jpg, .gif or .webp file."
        try:
            data = path.read_bytes()
        except OSError as error:
            return f"Cannot read {path}: {error.strerror}."
        if len(data) > MAX_IMAGE_BYTES:
            return f"{path} has {len(data) / 1e6:.0f} MB; the maximum is {MAX_IMAGE_BYTES / 1e6:.0f} MB."
        self.images.append(f"data:{kind};base64,{base64.b64encode(data).decode()}")
        return f"{path.name} goes with your next message."

    def add_answer(self, text: str) -> None:
        """Add an answer, whole or partial. An empty one removes the user message instead."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.drop_unanswered()

    def drop_unanswered(self) -> None:
        """Remove a user message that got no answer, to keep the roles alternating."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def drop_last_answer(self) -> bool:
        """Remove the last answer so that it can be generated again. False if there is none."""
        if len(self.turns) < 2 or self.turns[-1]["role"] != "assistant":
            return False
        self.turns.pop()
        return True

    def save(self, path: Path, *, overwrite: bool = False) -> str:
        if path.suffix == ".json":
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"## {m['role']}\n\n{_text_of(m['content'])}\n" for m in self.messages)
        try:
            with path.open("w" if overwrite else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return f"{path} exists already. To overwrite it: /save! {path}"
        except OSError as error:
            return f"Cannot write {path}: {error.strerror}."
        return f"Saved {len(self.turns)} messages to {path}."

    def load(self, path: Path) -> str:
        """Replace everything by a conversation that `save` wrote as JSON."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            return f"Cannot read {path}: {error.strerror}."
        except ValueError:
            return f"{path} is not JSON. /load reads what /save FILE.json wrote."
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            return f"{path} is not a list of messages with role and content."
        self.system = "\n".join(_text_of(m["content"]) for m in messages if m["role"] == "system")
        self.turns = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "system"]
        return f"Loaded {len(self.turns)} messages from {path}."


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ("system", "user", "assistant")
        and _is_content(value.get("content"))
    )


def _is_content(value: object) -> bool:
    """Text, or parts as `add_user_message` writes them."""
    return all(map(_is_part, value)) if isinstance(value, list) else isinstance(value, str)


def _is_part(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("text"), str) if value.get("type") == "text" else "image_url" in value


def _text_of(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part.get("type") == "text" else "(image)" for part in content)


@dataclass(frozen=True, slots=True)
class Reply:
    """What to do after a slash command: print `text`, open `model`, attach `image`, answer again, or leave."""

    text: str = ""
    model: str = ""
    image: str = ""
    answer_again: bool = False
    leave: bool = False


def run_slash(line: str, conversation: Conversation, fields: dict[str, object], model_name: str, stats: str) -> Reply:
    """Run one line that begins with a slash. `fields` is the sampling, which /set changes. `stats` summarises the last
    answer; empty if there is none."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    actions: dict[str, Callable[[], Reply]] = {
        "/help": lambda: Reply(HELP),
        "/clear": lambda: _clear(conversation),
        "/system": lambda: _system(conversation, argument),
        "/set": lambda: _set(fields, argument),
        "/model": lambda: Reply(model=argument) if argument else Reply(f"Model: {model_name}"),
        "/retry": lambda: _regenerate(conversation),
        "/regenerate": lambda: _regenerate(conversation),
        "/load": lambda: Reply(conversation.load(Path(argument).expanduser()) if argument else "Usage: /load FILE"),
        "/save": lambda: _save(conversation, argument, overwrite=False),
        "/save!": lambda: _save(conversation, argument, overwrite=True),
        "/image": lambda: Reply(image=argument) if argument else Reply("Usage: /image FILE"),
        "/stats": lambda: Reply(stats or "No answer yet."),
        "/exit": lambda: Reply(leave=True),
        "/quit": lambda: Reply(leave=True),
    }
    if name in actions:
        return actions[name]()
    close = difflib.get_close_matches(name, actions, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}?" if close else "Type /help for the list."
    return Reply(f"Unknown command {name}. {hint}")


def _clear(conversation: Conversation) -> Reply:
    conversation.turns.clear()
    conversation.images.clear()
    return Reply("Conversation cleared.")


def _save(conversation: Conversation, argument: str, *, overwrite: bool) -> Reply:
    if not argument:
        return Reply("Usage: /save FILE")
    return Reply(conversation.save(Path(argument).expanduser(), overwrite=overwrite))


def _system(conversation: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply(f"System prompt: {conversation.system}" if conversation.system else "No system prompt is set.")
    conversation.system = "" if argument == "-" else argument
    return Reply("System prompt set." if conversation.system else "System prompt removed.")


def _set(fields: dict[str, object], argument: str) -> Reply:
    name, _, text = argument.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if not argument:
        shown = ", ".join(f"{key} {value}" for key, value in fields.items())
        return Reply(
            f"Sampling: {shown}. The rest is the model's choice." if shown else "Sampling: the model's choice."
        )
    if name not in _SETTABLE:
        return Reply(f"There is no '{name}' to set. Known: {', '.join(_SETTABLE)}.")
    if text == "-":
        fields.pop(name, None)
        return Reply(f"{name}: the model's choice.")
    try:
        value = _SETTABLE[name](text)
        check_fields({**fields, name: value})
    except ValueError:
        return Reply(f"{name} is '{text}', which is not a number." if text else f"Usage: /set {name} VALUE")
    except MillraceError as error:
        return Reply(error.message)
    fields[name] = value
    return Reply(f"{name} is {value} from the next answer on.")


def _regenerate(conversation: Conversation) -> Reply:
    if conversation.drop_last_answer():
        return Reply(answer_again=True)
    return Reply("There is no answer to regenerate.")
