"""Gives another replica the KV blocks of a prompt."""

from __future__ import annotations

import asyncio

import msgspec

from millrace.errors import BadRequest, Conflict, Overloaded
from millrace.link.block_parts import PartAnswer, PartOfPrefix, PrefixFacts
from millrace.link.client import EngineClient
from millrace.serve.fetching.shared_part import write_shared
from millrace.serve.fetching.wire import BlocksGiven, BlocksWanted, sealed

MAX_AT_ONCE = 8
"""Parts that a front gives at the same time: bounds their memory."""
RETRY_S = 1.0


async def facts_of(client: EngineClient) -> PrefixFacts | None:
    """None if the model has no KV cache."""
    reply = await client.query("prefix_facts", "", None)
    return msgspec.msgpack.decode(reply, type=PrefixFacts) if reply else None


async def leading_columns(client: EngineClient, salt: bytes, tokens: bytes) -> int:
    """Leading columns of the prefix that are cached on the device."""
    return (await client.move_part(PartOfPrefix(0, 0, "", salt, tokens, 0, 0))).columns


class BlockSource:
    def __init__(self) -> None:
        self._num_open = 0

    async def give(self, client: EngineClient, asked: bytes, key: str) -> bytes:
        """The sealed answer to a `BlocksWanted`."""
        try:
            wanted = msgspec.msgpack.decode(asked, type=BlocksWanted)
        except msgspec.DecodeError as error:
            raise BadRequest(f"The body is not a question for KV blocks: {error}") from None
        if self._num_open >= MAX_AT_ONCE:
            raise Overloaded("This replica already gives blocks to others.", retry_after_s=RETRY_S)
        self._num_open += 1
        try:
            return sealed(asked, msgspec.msgpack.encode(await _given(client, wanted)), key)
        finally:
            self._num_open -= 1


async def _given(client: EngineClient, wanted: BlocksWanted) -> BlocksGiven:
    if wanted.count:
        part = PartOfPrefix(0, 0, "", wanted.salt, wanted.tokens, wanted.first, wanted.count)
        facts, answer = await asyncio.gather(facts_of(client), client.move_part(part))
    else:
        asked = leading_columns(client, wanted.salt, wanted.tokens)
        facts, columns = await asyncio.gather(facts_of(client), asked)
        answer = PartAnswer(columns=columns)
    if facts is None or facts.refused:
        raise Conflict(facts.refused if facts is not None else "The model has no KV cache.", code="export_impossible")
    if wanted.count > facts.part_blocks:
        raise BadRequest(f"Ask for at most {facts.part_blocks} blocks at once.")
    given = BlocksGiven(
        facts.identity, facts.layout, facts.block_tokens, answer.columns, answer.has, answer.blocks, answer.failure
    )
    checksum = write_shared(wanted.shared, given.blocks) if wanted.shared and given.blocks else None
    if checksum is None:
        return given
    return msgspec.structs.replace(given, blocks=b"", shared=checksum, shared_bytes=len(given.blocks))
