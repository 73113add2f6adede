"""The table of routes: every endpoint of every dialect, by path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from millrace.errors import MillraceError
from millrace.serve.anthropic import models as anthropic_models
from millrace.serve.anthropic import routes as anthropic
from millrace.serve.anthropic.write import error_body as anthropic_error_body
from millrace.serve.describe import routes_adapters as adapters
from millrace.serve.describe import routes_canary as canary
from millrace.serve.describe import routes_info as info
from millrace.serve.describe import routes_kv, routes_load, routes_stats, routes_steps
from millrace.serve.describe import routes_models as models
from millrace.serve.describe import routes_requests as requests
from millrace.serve.encode import classify, cohere_embed, multi_vector, rerank, score, sparse_vector
from millrace.serve.generate.work import Prepare
from millrace.serve.http.error_bodies import error_body
from millrace.serve.ollama import create as ollama_create
from millrace.serve.ollama import embed as ollama_embed
from millrace.serve.ollama import library as ollama_library
from millrace.serve.ollama import routes as ollama
from millrace.serve.ollama.write import error_body as ollama_error_body
from millrace.serve.openai import embeddings as openai_embeddings
from millrace.serve.openai import routes as openai
from millrace.serve.openai.kept import prefixes, routes_tenants
from millrace.serve.openai.kept import routes_moves as moves
from millrace.serve.openai.kept import routes_sessions as sessions
from millrace.serve.openai.kept import routes_stored as stored_chat
from millrace.serve.openai.translate_chat import prepare_chat
from millrace.serve.openai.translate_completions import prepare_completion
from millrace.serve.responses import routes as responses
from millrace.serve.responses import routes_conversations as conversations
from millrace.serve.responses.translate import prepare_response
from millrace.serve.stored import routes_batches as batches
from millrace.serve.stored import routes_files as files
from millrace.serve.tenancy.block_ticket import BLOCKS_PATH
from millrace.serve.transfer import stored_rows

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_RESPONSE = r"/v1/responses/{response_id:(?!(?:input_tokens|compact)$)[^/]+}"
"""Does not match two endpoints with fixed names, so that their `Allow` lists only their own methods."""

POST: dict[str, Handler] = {
    "/v1/chat/completions": openai.chat_completions,
    "/v1/chat/completions/{completion_id}": stored_chat.update,
    "/v1/completions": openai.completions,
    "/v1/embeddings": openai_embeddings.embeddings,
    **dict.fromkeys(("/v1/embed", "/v2/embed"), cohere_embed.embed),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), rerank.rerank),
    **dict.fromkeys(("/v1/score", "/score"), score.score),
    "/v1/multi-vector": multi_vector.multi_vector,
    "/v1/sparse-vector": sparse_vector.sparse_vector,
    **dict.fromkeys(("/v1/classify", "/classify"), classify.classify),
    "/v1/responses": responses.create,
    "/v1/responses/input_tokens": responses.count_tokens,
    "/v1/responses/{response_id}/cancel": responses.cancel,
    "/v1/conversations": conversations.create,
    "/v1/conversations/{conversation_id}": conversations.update,
    "/v1/conversations/{conversation_id}/items": conversations.add_items,
    "/v1/cache": prefixes.create,
    "/v1/cache/import": prefixes.import_file,
    "/v1/sessions": sessions.create,
    "/v1/sessions/import": moves.import_session,
    "/v1/sessions/{session_id}/turns": sessions.turn,
    "/v1/sessions/{session_id}/fork": sessions.fork,
    "/v1/sessions/{session_id}/renew": sessions.renew,
    "/v1/files": files.upload,
    "/v1/batches": batches.create,
    "/v1/batches/{batch_id}/cancel": batches.cancel,
    "/v1/requests/{request_id}/cancel": requests.cancel,
    BLOCKS_PATH: routes_kv.blocks,
    "/v1/stored": stored_rows.take,
    "/v1/created": ollama_create.take_created,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/embed": ollama_embed.embed,
    "/api/embeddings": ollama_embed.embeddings,
    "/api/show": ollama.show,
    "/api/pull": ollama_library.pull,
    "/api/create": ollama_create.create,
    "/api/copy": ollama_create.copy,
    "/api/blobs/{digest}": ollama_create.put_blob,
    "/v1/models/{model:.+}/load": models.load,
    "/v1/models/{model:.+}/unload": models.unload,
    "/v1/adapters": adapters.create,
    "/v1/adapters/{name}/canary": canary.start,
    "/v1/adapters/{name}/canary/promote": canary.promote,
    "/v1/load_lora_adapter": adapters.load_lora,
    "/v1/unload_lora_adapter": adapters.unload_lora,
    "/tokenize": info.tokenize,
    "/detokenize": info.detokenize,
}
GET: dict[str, Handler] = {
    "/v1/models": models.list_models,
    "/v1/models/{model:.+}": models.get_model,
    "/v1/adapters": adapters.listing,
    "/v1/adapters/{name}": adapters.retrieve,
    _RESPONSE: responses.retrieve,
    "/v1/responses/{response_id}/input_items": responses.list_input_items,
    "/v1/chat/completions": stored_chat.listing,
    "/v1/chat/completions/{completion_id}": stored_chat.retrieve,
    "/v1/chat/completions/{completion_id}/messages": stored_chat.list_messages,
    "/v1/conversations/{conversation_id}": conversations.retrieve,
    "/v1/conversations/{conversation_id}/items": conversations.list_items,
    "/v1/conversations/{conversation_id}/items/{item_id}": conversations.retrieve_item,
    "/v1/sessions": sessions.listing,
    "/v1/sessions/{session_id}": sessions.describe,
    "/v1/sessions/{session_id}/export": moves.export_session,
    "/v1/cache": prefixes.listing,
    "/v1/cache/{name}": prefixes.describe,
    "/v1/cache/{name}/export": prefixes.export,
    "/v1/files": files.listing,
    "/v1/files/{file_id}": files.describe,
    "/v1/files/{file_id}/content": files.content,
    "/v1/batches": batches.listing,
    "/v1/batches/{batch_id}": batches.describe,
    "/v1/requests": requests.listing,
    "/v1/requests/{request_id}": requests.describe,
    "/v1/requests/{request_id}/explain": requests.explain,
    "/v1/stats": routes_stats.stats,
    "/v1/load": routes_load.load,
    "/v1/kv/events": routes_kv.events,
    "/v1/kv/tree": routes_kv.tree,
    "/v1/stored": stored_rows.give,
    "/v1/created": ollama_create.list_created,
    "/v1/created/files/{digest}": ollama_create.read_blob,
    "/v1/steps": routes_steps.steps,
    "/v1/cost": routes_steps.cost,
    "/tokenizer_info": info.tokenizer_info,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.loaded,
    "/api/version": ollama.version,
}
HEAD: dict[str, Handler] = {"/api/blobs/{digest}": ollama_create.has_blob}
DELETE: dict[str, Handler] = {
    _RESPONSE: responses.delete,
    "/v1/chat/completions/{completion_id}": stored_chat.delete,
    "/v1/conversations/{conversation_id}": conversations.delete,
    "/v1/conversations/{conversation_id}/items/{item_id}": conversations.delete_item,
    "/v1/cache/{name}": prefixes.delete,
    "/v1/tenants/{tenant}/cache": routes_tenants.forget,
    "/v1/sessions/{session_id}": sessions.delete,
    "/v1/files/{file_id}": files.delete,
    "/v1/requests/{request_id}": requests.cancel,
    "/v1/adapters/{name}": adapters.delete,
    "/v1/adapters/{name}/canary": canary.abort,
    "/api/delete": ollama_library.delete,
}

BATCH_ENDPOINTS: dict[str, Prepare] = {
    "/v1/chat/completions": prepare_chat,
    "/v1/completions": prepare_completion,
    "/v1/embeddings": openai_embeddings.prepare_embeddings,
    "/v1/rerank": rerank.prepare_rerank,
    "/v1/score": score.prepare_score,
    "/v1/multi-vector": multi_vector.prepare_multi_vector,
    "/v1/sparse-vector": sparse_vector.prepare_sparse_vector,
    "/v1/classify": classify.prepare_classify,
    "/v1/responses": prepare_response,
}
"""Endpoints that a batch may be for."""

ERROR_BODIES: dict[str, Callable[[MillraceError], bytes]] = {
    anthropic.PATHS: anthropic_error_body,
    ollama.PATHS: ollama_error_body,
}
"""Path prefixes whose errors do not have OpenAI's shape."""


def error_body_for(request: web.Request) -> Callable[[MillraceError], bytes]:
    """For paths that several APIs have, or none: by the header that every client of Anthropic sends."""
    return anthropic_error_body if anthropic_models.is_anthropic(request) else error_body
