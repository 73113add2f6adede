"""Endpoints of the APIs spoken here that this server does not have: an honest 501 instead of a puzzling 404."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from millrace.errors import NotImplementedYet

ABSENT: dict[str, str] = {
    "/v1/embeddings": "Embeddings",
    "/v1/moderations": "Moderations",
    "/v1/audio": "Audio",
    "/v1/images": "Images",
    "/v1/videos": "Videos",
    "/v1/realtime": "Realtime sessions",
    "/v1/conversations": "Conversations",
    "/v1/uploads": "Uploads in parts",
    "/v1/fine_tuning": "Fine-tuning",
    "/v1/vector_stores": "Vector stores",
    "/v1/assistants": "Assistants",
    "/v1/threads": "Threads",
    "/v1/containers": "Containers",
    "/v1/evals": "Evals",
    "/v1/responses/compact": "Compaction of responses",
    "/v1/messages/batches": "Anthropic's message batches",
    "/api/embed": "Embeddings",
    "/api/embeddings": "Embeddings",
    "/api/pull": "Pulling models",
    "/api/push": "Pushing models",
    "/api/create": "Creating models",
    "/api/copy": "Copying models",
    "/api/delete": "Deleting models",
    "/api/blobs": "Blobs",
}
"""Path, whatever comes below it, and what it is called in a sentence."""


def add_absent_routes(app: web.Application) -> None:
    for path, what in ABSENT.items():
        handler = _refusal(what)
        app.router.add_route("*", path, handler)
        app.router.add_route("*", path + "/{rest:.*}", handler)


def _refusal(what: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    verb = "are" if what.endswith("s") else "is"

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise NotImplementedYet(
            f"{what} {verb} not supported by this server yet; GET /docs lists what is, or ask another server."
        )

    return refuse
