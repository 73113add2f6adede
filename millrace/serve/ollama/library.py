"""Ollama's /api/pull and /api/delete: models on this machine, for clients that may manage them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from millrace.errors import (
    BadRequest,
    Conflict,
    EngineUnavailable,
    Forbidden,
    MillraceError,
    ModelError,
    NotFound,
    Overloaded,
)
from millrace.serve.created_models import CreatedModel
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.event_stream import JSON_LINES
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.http.json_answer import encode, json_answer
from millrace.serve.ollama.schemas import OllamaDeleteRequest, OllamaPullRequest, OllamaPullStatus
from millrace.serve.ollama.translate import LATEST
from millrace.serve.ollama.write import error_body
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.trust import may_manage
from millrace.sources import library
from millrace.sources.resolve import check_is_name, resolve_model

_REPORT_EVERY_S = 0.2
RANDOM = "random:"
"""Begins the names of models with random weights."""
MAX_PULLS = 4
"""Downloads at once in one front."""
RETRY_S = 30.0
_pull_body = BodyDecoder(OllamaPullRequest)
_delete_body = BodyDecoder(OllamaDeleteRequest)


async def pull(request: web.Request) -> web.StreamResponse:
    """Download a model. A model that is on this machine already is a success for everybody."""
    state = request.app[STATE]
    body = _pull_body.decode(await read_body(request, state.body_limit_bytes))
    name = _name(body)
    if not await asyncio.to_thread(_is_here, name, state):
        check_may_manage(request, state)
        _check_is_name(name)
    if body.stream is False:
        await asyncio.shield(_start_fetch(name, state, _Reports(None)))
        return json_answer(request, OllamaPullStatus("success"))
    return await _stream_pull(request, name, state)


async def delete(request: web.Request) -> web.Response:
    state = request.app[STATE]
    name = _name(_delete_body.decode(await read_body(request, state.body_limit_bytes)))
    check_may_manage(request, state)
    if (
        not state.models.serves(name)
        and (made := await asyncio.to_thread(state.models.created.remove, name)) is not None
    ):
        await forget_adapter(state, made)
        return json_answer(request, {"status": "success"})
    if await asyncio.to_thread(_is_served, name, state):
        raise Conflict(f"The model '{name}' is being served; stop the server before you delete it.", param="model")
    try:
        await asyncio.to_thread(library.remove, name)
    except ModelError as error:
        raise NotFound(error.message, param="model") from error
    return json_answer(request, {"status": "success"})


async def forget_adapter(state: FrontState, made: CreatedModel | None) -> None:
    """Of a model that is no longer kept: the adapter that was uploaded for it."""
    if made is None or not made.digests:
        return
    if state.models.serves(made.model):
        with contextlib.suppress(EngineUnavailable):  # The next engine is not told of it.
            await state.models.find(made.model).client.adapters.drop(made.adapter)
    await asyncio.to_thread(state.models.created.remove_files, made)


async def _stream_pull(request: web.Request, name: str, state: FrontState) -> web.StreamResponse:
    reports = _Reports(asyncio.get_running_loop())
    fetching = _start_fetch(name, state, reports)
    fetching.add_done_callback(lambda _: reports.queue.put_nowait(None))
    headers = {REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace", "Content-Type": JSON_LINES}
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(request)
        await response.write(encode(OllamaPullStatus("pulling manifest")) + b"\n")
        while (status := await reports.queue.get()) is not None:
            await response.write(encode(status) + b"\n")
        try:
            await fetching
            await response.write(encode(OllamaPullStatus("success")) + b"\n")
        except MillraceError as error:
            await response.write(error_body(error) + b"\n")
        await response.write_eof()
    finally:
        reports.is_stopped = True  # The client has gone: the download ends, and the next one resumes it.
    return response


def _start_fetch(name: str, state: FrontState, reports: _Reports) -> asyncio.Future[None]:
    """Fetch in a thread of its own, which neither takes a thread from loading models nor delays the server's end."""
    if len(state.pulls) >= MAX_PULLS:
        raise Overloaded(
            f"{len(state.pulls)} models are being downloaded, the maximum; try again later.", retry_after_s=RETRY_S
        )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    state.pulls.add(done)
    done.add_done_callback(lambda _: done.cancelled() or done.exception())  # Nobody may be left to read it.
    done.add_done_callback(state.pulls.discard)

    def fetch() -> None:
        outcome: Exception | None = None
        try:
            _fetch(name, state, reports)
        except Exception as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # The loop has closed.
            loop.call_soon_threadsafe(settle, outcome)

    def settle(outcome: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if outcome is None else done.set_exception(outcome)

    threading.Thread(target=fetch, name="pull", daemon=True).start()
    return done


class _Reports:
    """Progress of the download's thread as lines for the stream, a few each second."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.queue: asyncio.Queue[OllamaPullStatus | None] = asyncio.Queue()
        self.is_stopped = False
        self._loop = loop
        self._what = ""
        self._at = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.is_stopped:
            raise ConnectionAbortedError("The client has gone.")
        now = time.monotonic()
        if self._loop is None or (what == self._what and done < total and now - self._at < _REPORT_EVERY_S):
            return
        self._what, self._at = what, now
        status = OllamaPullStatus(what, total or msgspec.UNSET, done if total else msgspec.UNSET)
        self._loop.call_soon_threadsafe(self.queue.put_nowait, status)


def _fetch(name: str, state: FrontState, reports: _Reports) -> None:
    if _is_here(name, state):
        return
    try:
        resolve_model(name, progress=reports, offline=state.config.model.offline, allow_paths=False)
    except ModelError as error:
        raise NotFound(error.message, param="model") from error


def _check_is_name(name: str) -> None:
    """An unknown name is refused before the stream begins. What a hub does not have shows only during the download."""
    try:
        check_is_name(name)
    except ModelError as error:
        raise NotFound(error.message, param="model") from error


def _is_here(name: str, state: FrontState) -> bool:
    return state.models.knows(name) or library.find_local(name) is not None


def _is_served(name: str, state: FrontState) -> bool:
    """True also if the server knows the model's files under another name."""
    local = library.find_local(name)
    return state.models.knows(name) or (local is not None and local.path.resolve() in _served_paths(state))


def _served_paths(state: FrontState) -> Iterator[Path]:
    for model in state.models:
        local = library.find_local(model.source)
        yield (local.path if local is not None else Path(model.source).expanduser()).resolve()


def _name(body: OllamaDeleteRequest) -> str:
    name = body.model if body.model is not None else body.name
    if not name:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    if name.startswith(("/", ".", "~", RANDOM)):
        raise BadRequest(f"'model' is {name[:80]!r}, a path; give a name.", param="model")
    return name.removesuffix(LATEST)


def check_may_manage(request: web.Request, state: FrontState) -> None:
    """Downloads fill the disk and deletions are final: by default only for operators' keys, and without keys only for
    programs on this machine."""
    server = state.config.server
    if not may_manage(request, server.manage_models, server.host, has_keys=state.keyring is not None):
        raise Forbidden(
            "This client may not download or delete models. The server's operator can allow it with"
            " --manage-models always or an operator's key (`millrace keys add --operator`), or use `millrace pull` and"
            " `millrace rm` on the machine."
        )
