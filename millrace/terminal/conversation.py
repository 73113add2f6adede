"""A conversation and the slash commands that act on it. No terminal here: text in, text out."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Message = dict[str, str]

HELP = """\
/help                this list
/clear               forget the conversation (the system prompt stays)
/system [TEXT]       show or set the system prompt; "/system -" removes it
/regenerate          answer the last question again
/save FILE           write the conversation: .json for the messages, anything else for readable text
/stats               tokens and times of the last answer
/exit                leave (so do Ctrl-D, and Ctrl-C twice)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next."""


@dataclass(slots=True)
class Conversation:
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """An answer, or the part of one that came before it was stopped. None at all takes the question back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def take_back(self) -> None:
        """Forget a question that got no answer, so that roles go on alternating."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def reopen(self) -> bool:
        """Drop the last answer, so that its question can be asked again. False when there is none."""
        if len(self.turns) < 2 or self.turns[-1]["role"] != "assistant":
            return False
        self.turns.pop()
        return True

    def save(self, path: Path) -> str:
        if path.suffix == ".json":
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"## {m['role']}\n\n{m['content']}\n" for m in self.messages)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}."
        return f"{len(self.turns)} messages saved to {path}."


@dataclass(frozen=True, slots=True)
class Reply:
    """What a slash command wants: something said, the question asked again, or an end."""

    text: str = ""
    answer_again: bool = False
    leave: bool = False


def run_slash(line: str, conversation: Conversation, stats: str) -> Reply:
    """Carry out one line that begins with a slash. `stats` is the sentence about the last answer, if there was one."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    actions: dict[str, Callable[[], Reply]] = {
        "/help": lambda: Reply(HELP),
        "/clear": lambda: _clear(conversation),
        "/system": lambda: _system(conversation, argument),
        "/regenerate": lambda: _regenerate(conversation),
        "/save": lambda: Reply(conversation.save(Path(argument).expanduser()) if argument else "Say where: /save FILE"),
        "/stats": lambda: Reply(stats or "There is no answer yet."),
        "/exit": lambda: Reply(leave=True),
        "/quit": lambda: Reply(leave=True),
    }
    if name in actions:
        return actions[name]()
    close = difflib.get_close_matches(name, actions, n=1, cutoff=0.5)
    return Reply(f"There is no {name}. " + (f"Did you mean {close[0]}?" if close else "/help lists what there is."))


def _clear(conversation: Conversation) -> Reply:
    conversation.turns.clear()
    return Reply("Forgotten.")


def _system(conversation: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply(f"The system prompt is: {conversation.system}" if conversation.system else "There is none.")
    conversation.system = "" if argument == "-" else argument
    return Reply("The system prompt is set." if conversation.system else "The system prompt is gone.")


def _regenerate(conversation: Conversation) -> Reply:
    if conversation.reopen():
        return Reply(answer_again=True)
    return Reply("There is no answer to give again.")
