"""Learns the KV block keys of prompts, so that the replicas' events say where a prefix is. Off the request's path."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from millrace.gateway.replica import Replica
from millrace.gateway.routing.block_keys import block_keys
from millrace.gateway.routing.request_facts import RequestFacts
from millrace.gateway.upstream import LOST, own_headers
from millrace.gateway.watch.replicas import Watch
from millrace.serve.tenancy.cache_scope import salted

MAX_AT_ONCE = 4
"""Further prompts are not learnt: the gateway's memory of what it sent decides for them."""
_TIMEOUT_S = 10.0


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class KeyLearner:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._tasks: set[asyncio.Task[None]] = set()

    def learn(self, replica: Replica, facts: RequestFacts, salt: str, headers: dict[str, str]) -> None:
        """`replica` has just computed the prompt under `salt`. `headers`: the client's credentials."""
        question, prefixes = _question(facts), self._watch.fleet.prefixes
        if question is None or prefixes.knows_keys(facts.asked.chain) or len(self._tasks) >= MAX_AT_ONCE:
            return
        if self._watch.block_tokens.get(replica.name) and prefixes.held_by(replica.name) is not None:
            task = asyncio.get_running_loop().create_task(
                self._ask(replica, facts, question, _salt(facts, salt), headers)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, replica: Replica, facts: RequestFacts, question: dict[str, Any], salt: bytes, headers: dict[str, str]
    ) -> None:
        fleet, block = self._watch.fleet, self._watch.block_tokens[replica.name]
        url = replica.settings.url + "/tokenize"
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                self._watch.session.post(
                    url, json=question, headers={**headers, **own_headers(fleet.settings)}
                ) as answer,
            ):
                if answer.status != 200:
                    return
                tokens = msgspec.json.decode(await answer.read(), type=_Tokenized).tokens
        except (*LOST, msgspec.DecodeError):
            return
        keys, held = block_keys(tokens, block, salt), fleet.prefixes.held_by(replica.name)
        # A prompt that was salted or rendered otherwise has other keys; then memory is better than these.
        if held is not None and keys and keys[-1] in held:
            fleet.prefixes.learn_keys(facts.asked.chain, facts.prompt_bytes, len(tokens), keys, block)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


def _salt(facts: RequestFacts, salt: str) -> bytes:
    given = facts.body.get("cache_salt")
    return salted(salt, given if isinstance(given, str) else "").encode(errors="replace")


def _question(facts: RequestFacts) -> dict[str, Any] | None:
    """The prompt as /tokenize takes it; None if it would not be rendered as it was for the answer."""
    body = facts.body
    model = {"model": facts.asked.model} if facts.asked.model else {}
    if isinstance(body.get("prompt"), str):
        return {**model, "prompt": body["prompt"]}
    if isinstance(body.get("messages"), list) and not body.get("tools") and "system" not in body:
        return {**model, "messages": body["messages"], "add_generation_prompt": True}
    return None
