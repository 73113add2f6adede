"""A turn of a session: its conversation goes on, and the answer is added to it before the client learns its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from millrace.errors import BadRequest
from millrace.link.messages import Finish
from millrace.params.classes import FinishReason
from millrace.params.keeping import Retain
from millrace.serve.generate.chat.tools import arguments_of
from millrace.serve.generate.choices import Choice, CollectedChoice, ParsedCollectedChoice
from millrace.serve.generate.fields.session import TURN_HEADER, Turn
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.job import Job
from millrace.serve.generate.messages import Conversation, KnownText, Message, PastCall
from millrace.serve.generate.work import Work
from millrace.serve.sessions import store
from millrace.serve.sessions.store import LastTurn, Session
from millrace.serve.state import FrontState
from millrace.text.answer_parser import marker_ids
from millrace.text.text_stream import TextStream


async def open_session(state: FrontState, session_id: str | None, owner: str) -> Session | None:
    """The session that a request names. Raises `NotFound` if this owner has none of that name."""
    if session_id is None:
        return None
    session = await state.store.run(store.get, session_id, owner)
    if session.model != state.model_name:
        raise BadRequest(
            f"The session {session_id!r} belongs to the model {session.model!r}, not to {state.model_name!r}. Name"
            " that model, or start a new session.",
            param="model",
        )
    return session


def continued(session: Session | None, conversation: Conversation) -> Conversation:
    """What the session holds, and then the new messages."""
    if session is None:
        return conversation
    messages, known = [*session.messages, *conversation.messages], KnownText(session.text, session.token_ids)
    return dataclasses.replace(conversation, messages=messages, known=known)


def taking_turn(
    state: FrontState, session: Session | None, owner: str, conversation: Conversation, generation: Generation
) -> Generation:
    """The generation whose answer becomes part of the session. `conversation`: the continued one."""
    if session is None:
        return generation
    if generation.beams is not None or generation.num_sequences > 1 or len(generation.prompts) > 1:
        raise BadRequest("'session_id' takes one answer; set n and best_of to 1.", param="session_id")
    prompt = generation.prompts[0]
    if prompt.num_dropped:
        raise BadRequest("A session's conversation is never cut; do not ask for its truncation.", param="session_id")
    turn = Turn(
        session.id,
        owner,
        session.turns,
        conversation.messages,
        num_known=max(0, len(session.token_ids) - 1),  # The last one was drawn and not computed.
        continues_answer=conversation.continue_final_message,
    )
    is_kept = state.config.memory.kv_retained > 0
    retain = Retain(
        session.ttl_s,
        session.handle,
        is_hint=False,
        handle_bytes=session.max_bytes,
        is_required=True,
        covers_answer=True,
    )
    return dataclasses.replace(
        generation,
        turn=turn,
        retain=retain if is_kept else generation.retain,
        asked_priority=session.priority if generation.asked_priority is None else generation.asked_priority,
        holds_end=True,
    )


def keeping_turn(work: Work) -> Work:
    """The same work, whose answer is added to its session, if it has one."""
    turn = work.generation.turn
    if turn is None:
        return work
    headers = {**work.headers, TURN_HEADER: f"number={turn.number + 1}"}
    conclude = partial(_conclude, work, turn, headers)
    return dataclasses.replace(work, conclude=conclude, headers=headers)


async def _conclude(work: Work, turn: Turn, headers: dict[str, str], job: Job) -> bytes:
    [choice] = job.choices
    token_ids = list(choice.prompt.token_ids) + _answer_ids(choice, turn)
    answer = answer_of(job, turn)
    text = choice.prompt.rendered + _written(job, choice, answer, token_ids[len(choice.prompt.token_ids) :])
    usage, finish = job.usage(), choice.finish
    resident = finish.resident_tokens if finish is not None else 0
    has_handle = finish is not None and bool(finish.handle)
    last = LastTurn(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        loaded_tokens=max(0, usage.cached_tokens - resident) if has_handle else 0,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.output_tokens,
        at=time.time(),
        recomputed_tokens=_recomputed(work.state, turn, usage.prompt_tokens, usage.cached_tokens),
    )
    messages = _with_answer(turn, answer)
    await work.state.store.run(
        store.end_turn, turn.session_id, turn.owner, turn.number, messages, token_ids, text, last
    )
    headers[TURN_HEADER] = (
        f"number={turn.number + 1}; prompt={last.prompt_tokens}; cached={last.cached_tokens};"
        f" loaded={last.loaded_tokens}; computed={last.computed_tokens}; recomputed={last.recomputed_tokens}"
    )
    if work.conclude is not None:
        return await work.conclude(job)
    return job.body() if job.out is None else job.writer.end_frames(usage)


def _recomputed(state: FrontState, turn: Turn, num_prompt: int, num_cached: int) -> int:
    """Tokens of whole blocks that earlier turns computed and that were not found."""
    limits = state.client.limits
    block = limits.block_size if limits is not None else 1
    return max(0, min(turn.num_known, num_prompt - 1) // block * block - num_cached)


def _answer_ids(choice: Choice, turn: Turn) -> list[int]:
    """Of the answer, without the token that ended it."""
    finish, ids = choice.finish, turn.output_ids
    is_end = finish is not None and bool(ids) and ids[-1] == finish.stop_token_id
    return ids[:-1] if is_end else list(ids)


def _written(job: Job, choice: Choice, answer: Message, token_ids: Sequence[int]) -> str:
    """The answer as a chat template is likely to write it: its text, or all of it, markers included."""
    if job.generation.form is None:
        return "".join(answer.texts)
    text = TextStream(job.state.tokenizer, msgspec.structs.replace(choice.params, stop=(), skip_special_tokens=False))
    return "".join(map(text.push, token_ids)) + text.finish()


def _with_answer(turn: Turn, answer: Message) -> list[Message]:
    if not turn.continues_answer:
        return [*turn.messages, answer]
    *before, last = turn.messages
    content = "".join(last.texts) + "".join(answer.texts)
    return [*before, dataclasses.replace(answer, content=content)]


class _Unsent:
    """Stands for the job of a choice whose tokens are read a second time."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def on_choice_end(self, choice: Choice, finish: Finish) -> None:
        pass

    def on_bug(self, error: Exception) -> None:
        raise error

    def abort_choice(self, choice: Choice, reason: FinishReason) -> None:
        pass


def answer_of(job: Job, turn: Turn) -> Message:
    """The answer as a message, as its client has read it."""
    [sent] = job.choices
    generation, params = job.generation, sent.params
    text = TextStream(job.state.tokenizer, params, marker_ids(job.state.tokenizer, generation.form))
    kind = CollectedChoice if generation.form is None else ParsedCollectedChoice
    choice = kind(_Unsent(generation), 0, sent.prompt, params, text)
    for token_id in turn.output_ids:
        choice.on_token(token_id, None)
    choice.finish = sent.finish
    choice.complete()
    output = choice.output
    ids = [call.id for call in sent.reader.calls] if sent.reader is not None else []
    calls = tuple(
        PastCall(ids[number] if number < len(ids) else call.id, call.name, arguments_of(call.arguments))
        for number, call in enumerate(output.calls)
    )
    return Message("assistant", output.text, tool_calls=calls, reasoning=output.reasoning or None)
