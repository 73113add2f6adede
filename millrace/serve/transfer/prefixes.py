"""Exports a prefix as parts of a file, and imports one: what the routes of handles and of sessions share."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO

import msgspec
import numpy as np
from aiohttp import web

from millrace.errors import BadRequest, CacheFull, Conflict, EngineUnavailable, NotFound, RequestTimeout
from millrace.link.block_parts import PartAnswer, PartOfPrefix, PrefixFacts
from millrace.link.caller import Caller
from millrace.link.messages import Finish, TokenLogprobs
from millrace.params.keeping import Retain
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.job import CACHE_RETRY_S
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import BODY_TIMEOUT_S
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.state import FrontState
from millrace.serve.tenancy.cache_scope import salt_of, scope_of
from millrace.serve.tenancy.keyring import Tenant
from millrace.serve.tenancy.owner import tenant_of
from millrace.serve.transfer.kv_file import (
    PART_OVERHEAD,
    KvFileHeader,
    KvFilePart,
    KvFileReader,
    KvFileWriter,
    Read,
    read_key,
    refusal,
)

IMPORT_PATHS = ("/v1/cache/import", "/v1/sessions/import")
EXPORT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Exported:
    """What to export."""

    name: str
    tokens: bytes
    """Whole blocks, as int32 bytes."""
    scope: str
    """The salt with which the engine names the blocks."""
    ttl_s: float
    session: bytes = b""
    retain: Retain | None = None
    """Keep the prefix first, if it is not kept already."""


async def facts_of(state: FrontState, handle: str, owner: str) -> PrefixFacts:
    """Those of the engine, and the prefix of this handle. Raises if its blocks cannot move."""
    reply = await state.client.query("prefix_facts", handle, owner)
    facts = msgspec.msgpack.decode(reply, type=PrefixFacts) if reply else None
    if facts is None or facts.refused:
        why = facts.refused if facts is not None else f"The model {state.model_name!r} has no KV cache."
        raise Conflict(why, code="export_impossible")
    return facts


# ── export ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def handle_export(facts: PrefixFacts, name: str) -> Exported:
    if facts.tokens is None:
        raise NotFound(f"There is no cache handle {name[:128]!r}; it may have expired.", param="name")
    return Exported(name, facts.tokens, facts.salt.decode(), facts.ttl_s)


async def send_export(
    request: web.Request, state: FrontState, facts: PrefixFacts, exported: Exported
) -> web.StreamResponse:
    """Writing waits for the client. The file ends early if something fails on the way, and is then refused."""
    key, tenant = read_key(state.config.memory.kv_export_key), tenant_of(request)
    writer = KvFileWriter(key)
    num_columns = len(exported.tokens) // 4 // facts.block_tokens
    header = KvFileHeader(
        model=state.model_name,
        identity=facts.identity,
        layout=facts.layout,
        block_tokens=facts.block_tokens,
        tenant=tenant.name,
        name=exported.name,
        cache_salt=salt_of(tenant, exported.scope),
        ttl_s=exported.ttl_s,
        tokens=exported.tokens,
        part_blocks=facts.part_blocks,
        num_parts=-(-num_columns // facts.part_blocks),
        session=exported.session,
    )
    if num_columns:
        await _make_resident(state, exported, tenant, request[REQUEST_ID])
    parts = _parts(state, tenant, exported, num_columns, facts.part_blocks)
    first = [await anext(parts)] if num_columns else []
    response = web.StreamResponse(
        headers={
            "Content-Type": "application/octet-stream",
            "Content-Disposition": f'attachment; filename="{exported.name.replace(":", "-")}.kv"',
            REQUEST_ID_HEADER: request[REQUEST_ID],
            "Server": "millrace",
        }
    )
    await response.prepare(request)
    await response.write(writer.header(header))
    for part in first:
        await response.write(writer.part(part))
    async for part in parts:
        await response.write(writer.part(part))
    await response.write_eof()
    return response


async def _parts(
    state: FrontState, tenant: Tenant, exported: Exported, num_columns: int, part_blocks: int
) -> AsyncIterator[KvFilePart]:
    for first in range(0, num_columns, part_blocks):
        count = min(part_blocks, num_columns - first)
        wanted = PartOfPrefix(0, 0, tenant.name, exported.scope.encode(), exported.tokens, first, count)
        answer = await state.client.move_part(wanted)
        if answer.failure:
            raise EngineUnavailable(f"The export failed: {answer.failure}")
        yield KvFilePart(first, count, answer.has, answer.blocks)


class _End:
    """Waits for the end of a request whose answer nobody reads."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None: ...

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None: ...

    def on_finish(self, finish: Finish) -> None:
        if not self.done.done():
            self.done.set_result(finish)


async def _make_resident(state: FrontState, exported: Exported, tenant: Tenant, request_id: str) -> None:
    """Load or compute what is not on the device now: a request for one token does."""
    end = _End()
    retain = exported.retain
    if retain is not None:
        retain = msgspec.structs.replace(retain, max_bytes=tenant.cache_mib << 20)
    sent = state.client.submit(
        np.frombuffer(exported.tokens, np.int32).tolist(),
        SamplingParams(max_tokens=1, temperature=0.0),
        end,
        cache_salt=exported.scope,
        retain=retain,
        caller=Caller(tenant.name, tenant.weight, (request_id,)),
    )
    try:
        finish = await asyncio.wait_for(end.done, EXPORT_TIMEOUT_S)
    except BaseException:
        state.client.abort(sent)
        raise
    if finish.refused:
        raise CacheFull(finish.refused, retry_after_s=CACHE_RETRY_S)
    if finish.reason not in ("stop", "length"):
        raise EngineUnavailable(f"The prefix could not be computed for its export: {finish.message or finish.reason}")


# ── import ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True)
class Received:
    """A file whose signatures were all verified."""

    header: KvFileHeader
    parts: IO[bytes]
    """Each with its length before it, in a temporary file."""
    lengths: list[int] = dataclasses.field(default_factory=list)


async def receive(request: web.Request, state: FrontState, facts: PrefixFacts) -> Received:
    """Read and verify the whole file before anything of it is used. The caller closes it."""
    key, tenant = read_key(state.config.memory.kv_export_key), tenant_of(request)
    file = KvFileReader(key, _reader(request))
    header = await file.header()
    _check(header, facts, tenant, state)
    received = Received(header, await state.store.in_thread(tempfile.TemporaryFile))
    try:
        for number in range(header.num_parts):
            part = await file.part(number, facts.part_bytes + PART_OVERHEAD)
            data = msgspec.msgpack.encode(part)
            received.lengths.append(len(data))
            await state.store.in_thread(lambda data=data: received.parts.write(data))  # type: ignore[misc]
        await file.end()
    except BaseException:
        received.parts.close()
        raise
    return received


def _reader(request: web.Request) -> Read:
    async def read(count: int) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                try:
                    return await request.content.readexactly(count)
                except asyncio.IncompleteReadError as error:
                    return error.partial
        except TimeoutError:
            raise RequestTimeout(f"No data of the file arrived for {BODY_TIMEOUT_S:g} s.") from None

    return read


def _check(header: KvFileHeader, facts: PrefixFacts, tenant: Tenant, state: FrontState) -> None:
    if header.identity != facts.identity:
        raise refusal(
            "kv_file_other_model",
            f"The file was exported from {header.model!r}, whose weights, number format or KV format are not those of"
            f" {state.model_name!r} here. Import it where the same model is served.",
        )
    if (header.layout, header.block_tokens) != (facts.layout, facts.block_tokens):
        raise refusal(
            "kv_file_other_format",
            f"The file's KV blocks are {header.layout!r} with {header.block_tokens} tokens; this server's are"
            f" {facts.layout!r} with {facts.block_tokens}. Start it with the same --kv-dtype and --block-size.",
        )
    if header.tenant != tenant.name:
        raise refusal(
            "kv_file_other_tenant", "The file belongs to another tenant. Import it with a key of that tenant."
        )
    num_columns = len(header.tokens) // 4 // header.block_tokens
    num_parts = -(-num_columns // max(1, header.part_blocks))
    if (header.num_parts, header.part_blocks) != (num_parts, facts.part_blocks):
        raise refusal("kv_file_other_format", "The file's blocks are divided in another way than this server's.")


def check_keeping(state: FrontState) -> None:
    """Refuse what this server never does, however often it is asked."""
    if not state.config.memory.kv_retained:
        raise BadRequest(
            "This server keeps nothing cached on request; its operator can set --kv-retained. A prompt that is sent"
            " again soon is found in the cache anyway.",
            code="cache_disabled",
        )


async def put_in(state: FrontState, received: Received, tenant: Tenant, retain: Retain) -> None:
    """Write the blocks into the engine's KV pool, kept under the handle that `retain` names. All or none."""
    check_keeping(state)
    header, at = received.header, 0
    scope = scope_of(tenant, header.cache_salt, share_prefixes=state.config.server.share_prefixes)
    retain = msgspec.structs.replace(retain, max_bytes=tenant.cache_mib << 20)
    try:
        for number, length in enumerate(received.lengths):
            data = await state.store.in_thread(lambda at=at, length=length: _read_at(received.parts, at, length))  # type: ignore[misc]
            part, at = msgspec.msgpack.decode(data, type=KvFilePart), at + length
            answer = await state.client.move_part(
                PartOfPrefix(
                    0,
                    0,
                    tenant.name,
                    scope.encode(),
                    header.tokens,
                    part.first,
                    part.count,
                    blocks=part.blocks,
                    has=part.has,
                    retain=None if number else retain,
                )
            )
            _raise_for(answer)
    except BaseException:
        await state.client.query("drop_handles", retain.name, tenant.name)
        raise


def _read_at(file: IO[bytes], at: int, length: int) -> bytes:
    file.seek(at)
    return file.read(length)


def _raise_for(answer: PartAnswer) -> None:
    if answer.is_full:
        raise CacheFull(answer.failure, retry_after_s=CACHE_RETRY_S)
    if answer.failure:
        raise EngineUnavailable(f"The import failed: {answer.failure}")
