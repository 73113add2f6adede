"""The endpoints of every API spoken here, by path. `routing` puts the guard around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from millrace.serve import (
    routes_anthropic,
    routes_batches,
    routes_files,
    routes_generate,
    routes_info,
    routes_ollama,
    routes_requests,
    routes_responses,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

POST: dict[str, Handler] = {
    "/v1/chat/completions": routes_generate.chat_completions,
    "/v1/completions": routes_generate.completions,
    "/v1/responses": routes_responses.create,
    "/v1/responses/input_tokens": routes_responses.count_tokens,
    "/v1/responses/{response_id}/cancel": routes_responses.cancel,
    "/v1/files": routes_files.upload,
    "/v1/batches": routes_batches.create,
    "/v1/batches/{batch_id}/cancel": routes_batches.cancel,
    "/v1/requests/{request_id}/cancel": routes_requests.cancel,
    "/v1/messages": routes_anthropic.messages,
    "/v1/messages/count_tokens": routes_anthropic.count_tokens,
    "/api/chat": routes_ollama.chat,
    "/api/generate": routes_ollama.generate,
    "/api/show": routes_ollama.show,
    "/tokenize": routes_info.tokenize,
    "/detokenize": routes_info.detokenize,
}
GET: dict[str, Handler] = {
    "/v1/models": routes_info.list_models,
    "/v1/models/{model:.+}": routes_info.get_model,
    "/v1/responses/{response_id}": routes_responses.retrieve,
    "/v1/responses/{response_id}/input_items": routes_responses.list_input_items,
    "/v1/files": routes_files.listing,
    "/v1/files/{file_id}": routes_files.describe,
    "/v1/files/{file_id}/content": routes_files.content,
    "/v1/batches": routes_batches.listing,
    "/v1/batches/{batch_id}": routes_batches.describe,
    "/v1/requests": routes_requests.listing,
    "/v1/requests/{request_id}": routes_requests.describe,
    "/v1/requests/{request_id}/explain": routes_requests.explain,
    "/api/tags": routes_ollama.tags,
    "/api/ps": routes_ollama.loaded,
    "/api/version": routes_ollama.version,
}
DELETE: dict[str, Handler] = {
    "/v1/responses/{response_id}": routes_responses.delete,
    "/v1/files/{file_id}": routes_files.delete,
    "/v1/requests/{request_id}": routes_requests.cancel,
}
