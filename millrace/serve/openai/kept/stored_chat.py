"""Stored chat completions (`store`): what is kept, and the answer of a stream put together from its chunks."""

from __future__ import annotations

import dataclasses
import sqlite3
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from millrace.errors import NotFound
from millrace.serve.generate.job import Job
from millrace.serve.generate.work import Work
from millrace.serve.http.ids import new_id
from millrace.serve.http.json_answer import encode
from millrace.serve.http.queries import Page
from millrace.serve.openai.answers import AnswerMessage, ChatAnswer, ChatChoice, ChatChunkChoice, ChatLogprobs
from millrace.serve.openai.schemas import ChatRequest
from millrace.serve.openai.schemas_tools import AnswerCall, FunctionCall, FunctionCallDelta
from millrace.serve.openai.write_chat import ChatWriter
from millrace.serve.openai.write_shared import reasons, usage_of
from millrace.serve.state import FrontState

_FURTHER = ("name", "tool_calls", "tool_call_id", "function_call")


class StoredMessage(msgspec.Struct):
    """A message of a stored completion's input."""

    id: str
    role: str
    content: Any
    name: str | UnsetType = UNSET
    tool_calls: Any = UNSET
    tool_call_id: str | UnsetType = UNSET
    function_call: Any = UNSET


class StoredList(msgspec.Struct):
    object: str
    data: list[msgspec.Raw]
    first_id: str
    last_id: str
    has_more: bool


class StoredDeleted(msgspec.Struct):
    id: str
    object: str = "chat.completion.deleted"
    deleted: bool = True


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True)
class _Streamed:
    """What the chunks of one choice have said."""

    message: AnswerMessage = field(default_factory=lambda: AnswerMessage("assistant", ""))
    logprobs: list[Any] = field(default_factory=list)
    finish: Any = "stop"
    stop_reason: str | int | None = None

    def add(self, chunk: ChatChunkChoice) -> None:
        delta, message = chunk.delta, self.message
        if isinstance(delta.content, str):
            message.content = (message.content or "") + delta.content
        if isinstance(delta.reasoning_content, str):
            before = message.reasoning_content if isinstance(message.reasoning_content, str) else ""
            message.reasoning_content = before + delta.reasoning_content
        for call in delta.tool_calls or ():
            self._add_call(call)
        if not isinstance(delta.function_call, UnsetType):
            self._add_function_call(delta.function_call)
        if chunk.logprobs is not None:
            self.logprobs += chunk.logprobs.content
        if chunk.finish_reason is not None:
            self.finish = chunk.finish_reason
            self.stop_reason = None if chunk.stop_reason is UNSET else chunk.stop_reason

    def _add_call(self, call: Any) -> None:
        calls = self.message.tool_calls = self.message.tool_calls or []
        if call.index >= len(calls):
            calls.append(AnswerCall(call.id, "function", FunctionCall(call.function.name, "")))
        if call.function.arguments:
            calls[call.index].function.arguments += call.function.arguments

    def _add_function_call(self, more: FunctionCallDelta) -> None:
        if not isinstance(more.name, UnsetType):
            self.message.function_call = FunctionCall(more.name, "")
        if not isinstance(more.arguments, UnsetType) and not isinstance(self.message.function_call, UnsetType):
            self.message.function_call.arguments += more.arguments

    def whole_message(self) -> AnswerMessage:
        if self.message.tool_calls or self.message.function_call:
            self.message.content = self.message.content or None
        return self.message


class StoringWriter(ChatWriter):
    """Also remembers a stream, so that it can be stored as one answer."""

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(job, **options)
        self._streamed: dict[int, _Streamed] = {}

    def _frame(self, choice: ChatChunkChoice, **further: Any) -> bytes:
        self._streamed.setdefault(choice.index, _Streamed()).add(choice)
        return super()._frame(choice, **further)

    def streamed_answer(self) -> bytes:
        has_logprobs = self._generation.logprobs is not None
        choices = [
            ChatChoice(
                index,
                said.whole_message(),
                ChatLogprobs(said.logprobs) if has_logprobs else None,
                said.finish,
                said.stop_reason,
            )
            for index, said in sorted(self._streamed.items())
        ]
        usage = usage_of(self._job.usage(), reasons=reasons(self._job))
        return encode(ChatAnswer(object="chat.completion", choices=choices, usage=usage, **self._common))


def storing(state: FrontState, request: ChatRequest, work: Work, owner: str) -> Work:
    """The same work, whose answer is stored before the client learns its end."""
    sent = [msgspec.json.decode(msgspec.json.encode(message)) for message in request.messages]
    messages = [_stored(message) for message in sent]
    return dataclasses.replace(work, conclude=partial(_conclude, state, messages, request.metadata or {}, owner))


def _stored(message: dict[str, Any]) -> StoredMessage:
    further = {name: message[name] for name in _FURTHER if message.get(name) is not None}
    return StoredMessage(new_id("msg_"), message["role"], message.get("content"), **further)


async def _conclude(
    state: FrontState, messages: list[StoredMessage], metadata: dict[str, str], owner: str, job: Job
) -> bytes:
    writer = job.writer
    assert isinstance(writer, StoringWriter)
    body = job.body() if job.out is None else writer.streamed_answer()
    await state.store.run(add, job.generation.answer_id, owner, job.generation.created, metadata, messages, body)
    return body if job.out is None else writer.end_frames(job.usage())


# ── the database; every function runs inside one transaction ──────────────────────────────────────────────────────────
def add(
    database: sqlite3.Connection,
    completion_id: str,
    owner: str,
    created: int,
    metadata: dict[str, str],
    messages: list[StoredMessage],
    body: bytes,
) -> None:
    database.execute(
        "INSERT OR REPLACE INTO chat_completions (id, owner, created_at, metadata, messages, body)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (completion_id, owner, created, msgspec.json.encode(metadata), msgspec.json.encode(messages), body),
    )


def _row(database: sqlite3.Connection, completion_id: str, owner: str, param: str = "completion_id") -> sqlite3.Row:
    row: sqlite3.Row | None = database.execute(
        "SELECT * FROM chat_completions WHERE id = ? AND owner = ?", (completion_id, owner)
    ).fetchone()
    if row is None:
        raise NotFound(
            f"There is no stored completion {completion_id[:200]!r}: it was deleted, or not made with 'store'.",
            param=param,
        )
    return row


def _shown(row: sqlite3.Row) -> bytes:
    """The answer with its labels."""
    body = msgspec.json.decode(row["body"])
    return msgspec.json.encode({**body, "metadata": msgspec.json.decode(row["metadata"])})


def get(database: sqlite3.Connection, completion_id: str, owner: str) -> bytes:
    return _shown(_row(database, completion_id, owner))


def relabel(database: sqlite3.Connection, completion_id: str, owner: str, metadata: dict[str, str]) -> bytes:
    _row(database, completion_id, owner)
    labels = msgspec.json.encode(metadata)
    database.execute("UPDATE chat_completions SET metadata = ? WHERE id = ?", (labels, completion_id))
    return get(database, completion_id, owner)


def delete(database: sqlite3.Connection, completion_id: str, owner: str) -> None:
    _row(database, completion_id, owner)
    database.execute("DELETE FROM chat_completions WHERE id = ?", (completion_id,))


def listing(database: sqlite3.Connection, owner: str, page: Page, labels: dict[str, str]) -> StoredList:
    """Completions that have all these labels."""
    order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
    bound, values = "", [owner]
    if page.after is not None:
        bound = f" AND number {beyond} ?"
        values.append(_row(database, page.after, owner, "after")["number"])
    rows = database.execute(f"SELECT * FROM chat_completions WHERE owner = ?{bound} ORDER BY number {order}", values)
    found: list[sqlite3.Row] = []
    for row in rows:
        held = msgspec.json.decode(row["metadata"], type=dict[str, str])
        if all(held.get(name) == value for name, value in labels.items()):
            found.append(row)
        if len(found) > page.limit:
            break
    shown = found[: page.limit]
    return _page([row["id"] for row in shown], [_shown(row) for row in shown], len(found) > page.limit)


def messages(database: sqlite3.Connection, completion_id: str, owner: str, page: Page) -> StoredList:
    held = msgspec.json.decode(_row(database, completion_id, owner)["messages"], type=list[StoredMessage])
    if page.newest_first:
        held.reverse()
    ids = [message.id for message in held]
    if page.after is not None:
        if page.after not in ids:
            raise NotFound(f"The completion has no message {page.after[:200]!r}.", param="after")
        held = held[ids.index(page.after) + 1 :]
    shown = held[: page.limit]
    return _page([message.id for message in shown], [msgspec.json.encode(one) for one in shown], len(held) > page.limit)


def _page(ids: list[str], bodies: list[bytes], has_more: bool) -> StoredList:
    first, last = (ids[0], ids[-1]) if ids else ("", "")
    return StoredList("list", [msgspec.Raw(body) for body in bodies], first, last, has_more)
