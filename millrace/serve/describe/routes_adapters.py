"""/v1/adapters: list, add and remove the LoRA adapters of a model; and vLLM's two endpoints for that."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from millrace.errors import AdapterError, Conflict, Forbidden, ModelError, ModelNotFound
from millrace.link.adapter_messages import AdapterFigures, AddAdapter, CanaryFigures
from millrace.serve.describe.asked_model import asked_model
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.http.schema import Strict, described
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import is_operator, tenant_of
from millrace.serve.tenancy.trust import may_manage
from millrace.sources.adapters.find import adapter_folder


class AdapterRequest(Strict, kw_only=True):
    """The body of POST /v1/adapters."""

    name: Annotated[str, described("Requests name it `MODEL:NAME`, or `NAME`.", minLength=1, maxLength=128)]
    path: Annotated[
        str, described("Directory that PEFT has saved, on the server's machine, or `org/repo` on the hub.", minLength=1)
    ]
    model: Annotated[str | None, described("Name of the served model; default: the first model.")] = None
    replace: Annotated[bool, described("Replace an adapter of this name; else it is refused.")] = False


class CanaryInfo(msgspec.Struct, kw_only=True):
    """A new version of an adapter that gets a share of its requests, or got it."""

    status: Literal["running", "promoted", "aborted", "returned"]
    """returned: taken back, because its requests failed or were slow."""
    share: float
    path: str | None
    """Null for keys that are not an operator's."""
    why: str
    """Why it was taken back."""
    old: VersionInfo
    new: VersionInfo


class VersionInfo(msgspec.Struct, kw_only=True):
    """Of one version, since the canary began."""

    requests: int
    """Sequences that ended by themselves, or failed."""
    failed: int
    token_ms: float
    """Median of the last requests, without waiting; 0 without any."""


class AdapterInfo(msgspec.Struct, kw_only=True):
    """One adapter of a model."""

    id: str
    """`MODEL:NAME`, as requests name it."""
    object: Literal["adapter"] = "adapter"
    name: str
    model: str
    path: str | None
    """Null for keys that are not an operator's."""
    status: Literal["known", "loading", "memory", "resident", "failed"]
    """known: read when a request needs it; memory: in host memory; resident: it has a slot on the device."""
    max_rank: int
    bytes: int
    base_model: str
    """As the adapter's own files name it."""
    is_added: bool
    """A client added it while the server ran."""
    open_requests: int
    loads: int
    """Times that its files were read."""
    failure: str
    """Why it could not be read last time."""
    requests: int
    """Sequences that ended."""
    prompt_tokens: int
    output_tokens: int
    canary: CanaryInfo | None
    """The last one, if there was any."""


class AdapterInfoList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[AdapterInfo]


class DeletedAdapter(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    deleted: bool = True


class LoadLoraRequest(Strict, kw_only=True):
    """The body of vLLM's POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, described("Requests name it so.", minLength=1, maxLength=128)]
    lora_path: Annotated[str, described("Directory that PEFT has saved, on the server's machine.", minLength=1)]
    load_inplace: Annotated[bool, described("Replace an adapter of this name; else it is refused.")] = False
    base_model_name: Annotated[str | None, described("Name of the served model; default: the first model.")] = None


class UnloadLoraRequest(Strict, kw_only=True):
    """The body of vLLM's POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, described("Of the adapter.", minLength=1)]
    lora_int_id: Annotated[int | None, described("vLLM's own number of it; not used.")] = None


_adapter_body = BodyDecoder(AdapterRequest)
_load_body = BodyDecoder(LoadLoraRequest)
_unload_body = BodyDecoder(UnloadLoraRequest)


async def listing(request: web.Request) -> web.Response:
    check_query(request, ("model",))
    state = request.app[STATE]
    models = [asked_model(request)] if request.query.get("model") else list(state.models)
    data = [one for model in models for one in await _adapters(request, model)]
    return json_answer(request, AdapterInfoList(data=data))


async def retrieve(request: web.Request) -> web.Response:
    model, name = named(request, request.match_info["name"])
    for one in await _adapters(request, model):
        if one.name == name:
            return json_answer(request, one)
    raise _missing(name, model)


async def create(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_may_manage(request, state)
    body = _adapter_body.decode(await read_body(request, state.body_limit_bytes))
    model = state.models.find(body.model or state.model_name)
    added = await add(state, model, AddAdapter(body.name, body.path, is_new=not body.replace))
    return json_answer(request, shown(model, added, has_path=True))


async def delete(request: web.Request) -> web.Response:
    check_may_manage(request, request.app[STATE])
    model, name = named(request, request.match_info["name"])
    await _drop(model, name)
    return json_answer(request, DeletedAdapter(id=f"{model.name}:{name}"))


async def load_lora(request: web.Request) -> web.Response:
    """vLLM's: answers with a sentence."""
    state = request.app[STATE]
    check_may_manage(request, state)
    body = _load_body.decode(await read_body(request, state.body_limit_bytes))
    model = state.models.find(body.base_model_name or state.model_name)
    await add(state, model, AddAdapter(body.lora_name, body.lora_path, is_new=not body.load_inplace))
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora(request: web.Request) -> web.Response:
    """vLLM's: answers with a sentence."""
    state = request.app[STATE]
    check_may_manage(request, state)
    body = _unload_body.decode(await read_body(request, state.body_limit_bytes))
    model, name = named(request, body.lora_name)
    await _drop(model, name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def add(state: FrontState, model: ServedModel[FrontState], asked: AddAdapter) -> AdapterFigures:
    """The model is loaded if it is not. Raises AdapterError, or Conflict for a name that is taken."""
    await (await state.for_model(model.name)).await_engine()
    if asked.is_new and asked.name in (model.client.adapters.names or ()):
        raise Conflict(
            f"There is an adapter {asked.name!r} of {model.name!r}. Remove it first, replace it (`replace`, or vLLM's"
            " `load_inplace`), or give this one another name.",
            param="name",
        )
    try:
        max_bytes, offline = state.config.adapters.max_bytes, state.config.model.offline
        folder = await asyncio.to_thread(adapter_folder, asked.path, max_bytes=max_bytes, offline=offline)
    except ModelError as error:
        raise AdapterError(error.message, param="path") from error
    answer = await model.client.adapters.add(msgspec.structs.replace(asked, path=str(folder)))
    if answer.error:
        raise AdapterError(answer.error, param="path")
    return answer.adapters[0]


async def _drop(model: ServedModel[FrontState], name: str) -> None:
    answer = await model.client.adapters.drop(name)
    if answer.is_unknown:
        raise ModelNotFound(answer.error, param="name")
    if answer.error:
        raise AdapterError(answer.error, param="name")


def named(request: web.Request, name: str) -> tuple[ServedModel[FrontState], str]:
    """The model and the adapter's own name, which may stand behind the model's."""
    state = request.app[STATE]
    if asked := request.query.get("model"):
        name = f"{asked}:{name}"
    if state.models.knows(name):
        model, adapter = state.models.with_adapter(name)
        if adapter:
            return model, adapter
    raise _missing(name, asked_model(request))


def _missing(name: str, model: ServedModel[FrontState]) -> ModelNotFound:
    return ModelNotFound(f"There is no adapter {name[:200]!r} of {model.name!r}.", param="name")


async def _adapters(request: web.Request, model: ServedModel[FrontState]) -> list[AdapterInfo]:
    """None of a model that is not loaded."""
    if model.client.ready is None or model.client.failure is not None:
        return []
    has_path, may_use, models = is_operator(request), tenant_of(request).may_use, request.app[STATE].models
    figures = [one for one in await model.client.adapters.figures() if may_use(models.names_of(model, one.name))]
    return [shown(model, one, has_path=has_path) for one in figures]


def shown(model: ServedModel[FrontState], one: AdapterFigures, *, has_path: bool) -> AdapterInfo:
    return AdapterInfo(
        id=f"{model.name}:{one.name}",
        name=one.name,
        model=model.name,
        path=one.path if has_path else None,
        status=one.state,
        max_rank=one.max_rank,
        bytes=one.bytes,
        base_model=one.base_model,
        is_added=one.is_added,
        open_requests=one.open_requests,
        loads=one.loads,
        failure=one.failure if has_path or not one.failure else "It could not be read; its operator sees why.",
        requests=one.requests,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        canary=_canary(one.canary, has_path=has_path),
    )


def _canary(one: CanaryFigures | None, *, has_path: bool) -> CanaryInfo | None:
    if one is None:
        return None
    old, new = (
        VersionInfo(requests=each.requests, failed=each.failed, token_ms=each.token_ms) for each in (one.old, one.new)
    )
    path = one.path if has_path else None
    return CanaryInfo(status=one.state, share=one.share, path=path, why=one.why, old=old, new=new)


def check_may_manage(request: web.Request, state: FrontState) -> None:
    server = state.config.server
    if not may_manage(request, server.manage_models, server.host, has_keys=state.keyring is not None):
        raise Forbidden(
            "This client may not add or remove adapters. The server's operator can allow it with"
            " --manage-models always or an operator's key (`millrace keys add --operator`)."
        )
