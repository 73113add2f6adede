"""Endpoints of the supported APIs that this server does not implement: they answer 501 rather than 404."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from millrace.errors import NotImplementedYet

_DOCS = "GET /docs lists the endpoints of this server."

ABSENT: dict[str, str] = {
    "/v1/moderations": "Moderations are",
    "/v1/audio": "Audio is",
    "/v1/images": "Images are",
    "/v1/videos": "Videos are",
    "/v1/realtime": "Realtime sessions are",
    "/v1/uploads": "Uploads in parts are",
    "/v1/fine_tuning": "Fine-tuning is",
    "/v1/vector_stores": "Vector stores are",
    "/v1/assistants": "Assistants are",
    "/v1/threads": "Threads are",
    "/v1/containers": "Containers are",
    "/v1/evals": "Evals are",
    "/v1/responses/compact": "Compaction of responses is",
    "/v1/messages/batches": "Anthropic's message batches are",
    "/api/push": "Pushing models is",
}
"""Path (with everything below it) and the subject and verb of the error message."""


def add_absent_routes(app: web.Application) -> None:
    for path, subject in ABSENT.items():
        handler = _refusal(subject)
        app.router.add_route("*", path, handler)
        app.router.add_route("*", path + "/{rest:.*}", handler)


def _refusal(subject: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise NotImplementedYet(f"{subject} not supported yet. {_DOCS}")

    return refuse
