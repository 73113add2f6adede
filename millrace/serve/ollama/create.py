"""Ollama's /api/create, /api/copy and /api/blobs: models made of served ones, for clients that may manage models."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from millrace.errors import AdapterError, BadRequest, BodyTooLarge, Conflict, NotFound, RequestTimeout
from millrace.link.adapter_messages import AddAdapter
from millrace.serve.created_models import MAX_NAME_CHARS, CreatedModel, own_name
from millrace.serve.generate.checks import refuse_unsupported
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import BODY_TIMEOUT_S, BodyDecoder, read_body
from millrace.serve.http.event_stream import JSON_LINES
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.http.json_answer import encode, json_answer
from millrace.serve.ollama.library import RANDOM, check_may_manage, forget_adapter
from millrace.serve.ollama.schemas import (
    CREATE_NOT_SUPPORTED,
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaOptions,
    OllamaPullStatus,
)
from millrace.serve.ollama.translate import LATEST, SAMPLING, check_num_ctx, check_options
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState

BLOBS_PATH = "/api/blobs/"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_create_body = BodyDecoder(OllamaCreateRequest)
_copy_body = BodyDecoder(OllamaCopyRequest)
_created = BodyDecoder(CreatedModel)


async def create(request: web.Request) -> web.Response:
    """A name for a served model with an adapter, a system prompt or parameters. Replaces what had the name."""
    state = request.app[STATE]
    body = _create_body.decode(await read_body(request, state.body_limit_bytes))
    check_may_manage(request, state)
    refuse_unsupported(body, CREATE_NOT_SUPPORTED, "")
    wanted = _described(state, body)
    await _keep(state, wanted)
    success = OllamaPullStatus("success")
    if body.stream is False:
        return json_answer(request, success)
    lines = (OllamaPullStatus(f"using {wanted.model}"), OllamaPullStatus("writing manifest"), success)
    return web.Response(body=b"".join(encode(line) + b"\n" for line in lines), content_type=JSON_LINES)


async def copy(request: web.Request) -> web.Response:
    """A second name for a model."""
    state = request.app[STATE]
    body = _copy_body.decode(await read_body(request, state.body_limit_bytes))
    check_may_manage(request, state)
    source, name = _plain(body.source), _checked_name(state, body.destination)
    made, (model, adapter) = state.models.made(source), _served(state, source, "source")
    if made is not None and made.digests:
        copied = msgspec.structs.replace(made, name=name, adapter=own_name(name), created=int(time.time()))
    elif made is not None:
        copied = msgspec.structs.replace(made, name=name, created=int(time.time()))
    else:
        copied = CreatedModel(name=name, model=model.name, adapter=adapter, created=int(time.time()))
    await _keep(state, copied)
    return web.Response()


# ── for gateways ──────────────────────────────────────────────────────────────────────────────────────────────────────
class CreatedList(msgspec.Struct):
    data: list[CreatedModel]
    object: Literal["list"] = "list"


async def list_created(request: web.Request) -> web.Response:
    """What clients made, with all that another replica needs to have the same."""
    state = request.app[STATE]
    check_may_manage(request, state)
    return json_answer(request, CreatedList(await asyncio.to_thread(state.models.created.all)))


async def take_created(request: web.Request) -> web.Response:
    """Keep a model that another replica has. Its files were sent before, as for /api/create."""
    state = request.app[STATE]
    made = _created.decode(await read_body(request, state.body_limit_bytes))
    check_may_manage(request, state)
    if state.models.made(_checked_name(state, made.name)) is not None:
        raise Conflict(f"There is a model {made.name!r} already.", param="name")
    own = own_name(made.name) if made.digests else made.adapter
    _served(state, made.model if made.digests or not own else f"{made.model}:{own}", "model")
    await _keep(state, msgspec.structs.replace(made, adapter=own))
    return json_answer(request, {"object": "model", "id": made.name})


async def read_blob(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    check_may_manage(request, state)
    path = state.models.created.blob(request.match_info["digest"])
    if not await asyncio.to_thread(path.is_file):
        raise NotFound(f"There is no file {request.match_info['digest']}.", param="digest")
    return web.FileResponse(path, headers={REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace"})


# ── blobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def has_blob(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_may_manage(request, state)
    path = state.models.created.blob(request.match_info["digest"])
    return web.Response(status=200 if await asyncio.to_thread(path.is_file) else 404)


async def put_blob(request: web.Request) -> web.Response:
    """Receives a file, which must have the digest in the path."""
    state, digest = request.app[STATE], request.match_info["digest"]
    check_blob(request, state)
    created = state.models.created
    path = created.blob(digest)
    if await asyncio.to_thread(path.is_file):
        await asyncio.to_thread(os.utime, path)
        return web.Response(status=200)
    await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(created.remove_unused_blobs)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{id(request)}")
    try:
        found = await _receive(request, state, partial)
        if found != digest:
            raise BadRequest(f"The body has the digest {found}, not that of the path. Send it again.", param="digest")
        await asyncio.to_thread(os.replace, partial, path)
    finally:
        await asyncio.to_thread(partial.unlink, missing_ok=True)
    return web.Response(status=201)


def check_blob(request: web.Request, state: FrontState) -> None:
    """Refuse what the headers alone show to be wrong, before the body is read."""
    check_may_manage(request, state)
    _check_size(request.content_length or 0, state)


async def _receive(request: web.Request, state: FrontState, path: Any) -> str:
    digest, size = hashlib.sha256(), 0
    file = await asyncio.to_thread(path.open, "wb")
    try:
        while True:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                piece = await request.content.readany()
            if not piece:
                return f"sha256:{digest.hexdigest()}"
            size += len(piece)
            _check_size(size, state)
            await asyncio.to_thread(file.write, piece)
            digest.update(piece)
    except TimeoutError:
        raise RequestTimeout(f"No data of the file arrived for {BODY_TIMEOUT_S:g} s.") from None
    except (RequestPayloadError, HttpProcessingError) as error:
        raise BadRequest(f"The file's transfer broke: {str(error)[:80]}", code="malformed_http") from None
    finally:
        await asyncio.to_thread(file.close)


def _check_size(num_bytes: int, state: FrontState) -> None:
    limit = state.config.adapters.max_bytes
    if num_bytes > limit:
        raise BodyTooLarge(
            f"The file has at least {num_bytes} bytes; adapters may have {limit} (--adapter-memory). Nothing was kept."
        )


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _described(state: FrontState, body: OllamaCreateRequest) -> CreatedModel:
    name = _checked_name(state, body.model or body.name or "")
    if not body.from_:
        raise BadRequest("'from' is required: the name of a model that this server serves.", param="from")
    source = _plain(body.from_)
    made, (model, adapter) = state.models.made(source), _served(state, source, "from")
    digests = _files(body.adapters or {})
    if digests and adapter:
        raise BadRequest(f"{source!r} has an adapter already; make the model from {model.name!r}.", param="adapters")
    if made is not None and made.digests:
        raise BadRequest(
            f"{source!r} has an adapter of its own; make the model from {model.name!r}, with the same `adapters`.",
            param="from",
        )
    sampling, stop, options = _parameters(state, body.parameters or OllamaOptions())
    licence = "\n".join(body.license) if isinstance(body.license, list) else body.license
    return CreatedModel(
        name=name,
        model=model.name,
        adapter=own_name(name) if digests else adapter,
        digests=digests,
        system=body.system if body.system is not None else made.system if made else "",
        sampling={**(made.sampling if made else {}), **sampling},
        options={**(made.options if made else {}), **options},
        stop=stop or (made.stop if made else ()),
        licence=licence if licence is not None else made.licence if made else "",
        created=int(time.time()),
    )


def _files(given: dict[str, str]) -> dict[str, str]:
    """Digests by the names that PEFT gives the files."""
    found: dict[str, str] = {}
    for path, digest in given.items():
        name = PurePosixPath(path).name
        if name.endswith(".safetensors"):
            name = WEIGHTS
        elif name != CONFIG:
            raise BadRequest(
                f"adapters has {path[:200]!r}; an adapter is an {CONFIG} and a safetensors file, as PEFT saves them."
                " Pickles and GGUF files are not read.",
                param="adapters",
            )
        if name in found:
            raise BadRequest(f"adapters has two files for {name}.", param="adapters")
        found[name] = digest
    if found and len(found) < 2:
        missing = (({CONFIG, WEIGHTS}) - found.keys()).pop()
        raise BadRequest(f"adapters has no {missing}. Upload it to {BLOBS_PATH}DIGEST and name it.", param="adapters")
    return found


def _parameters(
    state: FrontState, options: OllamaOptions
) -> tuple[dict[str, float], tuple[str, ...], dict[str, object]]:
    """Those that are defaults in every dialect, stop strings, and those that are defaults in Ollama's."""
    check_options(state, options)
    if state.client.limits is not None:
        check_num_ctx(options.num_ctx, state.client.limits.max_context)
    given = {name: value for name in options.__struct_fields__ if (value := getattr(options, name)) is not None}
    given = {name: value for name, value in given.items() if not isinstance(value, msgspec.Raw | msgspec.UnsetType)}
    stop = given.pop("stop", ())
    sampling = {ours: given.pop(theirs) for theirs, ours in SAMPLING.items() if theirs in given}
    return sampling, (stop,) if isinstance(stop, str) else tuple(stop), given


async def _keep(state: FrontState, made: CreatedModel) -> None:
    """Also in the place of what had its name."""
    if made.digests:
        await _add_uploaded(state, made)
    try:
        before = await asyncio.to_thread(state.models.created.put, made)
    except BaseException:
        await forget_adapter(state, made)
        raise
    await forget_adapter(state, before)


async def _add_uploaded(state: FrontState, made: CreatedModel) -> None:
    created, model = state.models.created, state.models.find(made.model)
    for name, digest in made.digests.items():
        if not await asyncio.to_thread(created.blob(digest).is_file):
            raise BadRequest(f"There is no file {digest} ({name}); send it to {BLOBS_PATH}{digest}.", param="adapters")
    folder = await asyncio.to_thread(created.make_adapter, made)
    try:
        await (await state.for_model(model.name)).await_engine()
        answer = await model.client.adapters.add(AddAdapter(made.adapter, str(folder)))
        if answer.error:
            raise AdapterError(
                answer.error.replace(f"{folder}{os.sep}", "").replace(str(folder), made.name), param="adapters"
            )
    except BaseException:
        await asyncio.to_thread(created.remove_files, made)
        raise


def _served(state: FrontState, name: str, field: str) -> tuple[ServedModel[FrontState], str]:
    if not state.models.knows(name):
        raise NotFound(
            f"The model {name[:200]!r} is not served here; `{field}` names a served model: {state.models.shown()}.",
            param=field,
        )
    return state.models.with_adapter(name)


def _checked_name(state: FrontState, given: str) -> str:
    name = _plain(given)
    is_plain = len(name) <= MAX_NAME_CHARS and all(char.isalnum() or char in "-_./:" for char in name)
    if not is_plain or not name[:1].isalnum() or name.startswith(RANDOM) or name.endswith(LATEST):
        raise BadRequest(
            f"{name[:200]!r} is no name for a model: use letters, digits and - _ . / : (at most {MAX_NAME_CHARS},"
            f" a letter or digit first), without {RANDOM!r} and more than one {LATEST!r}.",
            param="model",
        )
    if state.models.knows(name) and state.models.made(name) is None:
        raise Conflict(f"This server serves {name!r}; give the new model another name.", param="model")
    return name


def _plain(name: str) -> str:
    return name.removesuffix(LATEST)
