"""The paths of the OpenAPI document: operations with their parameters, bodies, answers and errors."""

from __future__ import annotations

from typing import Any

from millrace.observe.history import MAX_WINDOW_S
from millrace.serve.anthropic import routes as anthropic
from millrace.serve.describe.routes_requests import MAX_LISTED
from millrace.serve.ollama import routes as ollama
from millrace.serve.tenancy.access import OPEN_PATHS
from millrace.web.pages import is_open as is_page

ERRORS = {
    "400": "The request is invalid; the message names the field and its value.",
    "401": "The API key is missing or unknown.",
    "403": "The key's tenant may not do this.",
    "404": "The model, file, batch, response or request does not exist.",
    "408": "The body did not arrive in time.",
    "409": "Its present state does not allow this.",
    "413": "The body is too large and was not read.",
    "415": "The body is compressed, or not UTF-8.",
    "429": "A quota is exhausted, the queue is full, or the first token would come too late; see Retry-After.",
    "499": "The request was cancelled through /v1/requests.",
    "500": "The request failed.",
    "503": "The engine is loading, draining or down; see Retry-After.",
    "504": "The deadline passed.",
}
BODY_ERRORS = ("400", "404", "408", "413", "415", "500", "503")
_STREAM_NOTE = (
    "With `stream`: server-sent events with a chunk in `data: `, then `data: [DONE]`."
    " An error after the first event is sent as an event with an `error` object."
)
_TYPED_NOTE = "With `stream`: server-sent events, with the type in `event: ` and in the data."
_LINES_NOTE = "Streams unless `stream` is false: one JSON object per line, the last with `done`."

_NAME = "smollm2-135m-instruct"
_TURN = [{"role": "user", "content": "Why is the sky blue?"}]
_LINK = "#/components/schemas/"


def ref(name: str) -> dict[str, str]:
    return {"$ref": _LINK + name}


def _json(name: str, description: str = "OK") -> dict[str, Any]:
    return {"description": description, "content": _as_json(ref(name))}


def _either(name: str) -> dict[str, Any]:
    """In OpenAI's form, or in Anthropic's for clients that send the header `anthropic-version`."""
    schema = {"anyOf": [ref(name), ref(f"Anthropic{name}")]}
    return {"description": "In Anthropic's form with the header `anthropic-version`.", "content": _as_json(schema)}


def _as_json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _errors(statuses: tuple[str, ...], shape: str) -> dict[str, Any]:
    return {status: _json(shape, ERRORS[status]) for status in statuses}


def _body(name: str, example: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": ref(name), "example": example}}}


def _operation(
    tag: str, operation: str, summary: str, answer: Any, errors: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """`answer` is a schema name or a whole response object; `shape` is the schema of errors."""
    shape = more.pop("shape", "ErrorAnswer")
    ok = _json(answer) if isinstance(answer, str) else answer
    responses = {"200": ok, **_errors(errors, shape)}
    return {"tags": [tag], "operationId": operation, "summary": summary, "responses": responses, **more}


def _header() -> dict[str, Any]:
    return {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "Echoed in the answer if it is at most 128 printable characters; otherwise replaced.",
        "schema": {"type": "string"},
    }


def _timeout_header() -> dict[str, Any]:
    return {
        "name": "X-Request-Timeout",
        "in": "header",
        "required": False,
        "description": "Seconds until the request is ended with an error; the smaller of this and `timeout` counts.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _in_query(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _page(most: int, *names: str) -> list[dict[str, Any]]:
    known = {
        "limit": _in_query("limit", type="integer", minimum=1, maximum=most),
        "order": _in_query("order", type="string", enum=["asc", "desc"]),
        "after": _in_query("after", type="string"),
    }
    return [known[name] for name in names]


def _event(name: str) -> dict[str, Any]:
    """One server-sent event as an object; its data is JSON in a string."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(name)}
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def _generate(
    operation: str,
    summary: str,
    names: tuple[str, str, str],
    example: dict[str, Any],
    *,
    note: str = _STREAM_NOTE,
    media_type: str = "text/event-stream",
    shape: str = "ErrorAnswer",
) -> dict[str, Any]:
    request, answer, chunk = names
    ok = _json(answer, "The answer, or its stream.")
    ok["content"][media_type] = {"schema": _event(chunk) if media_type == "text/event-stream" else ref(chunk)}
    errors = tuple(status for status in ERRORS if status != "409" or request == "ResponsesRequest")
    made = _operation(
        "generate",
        operation,
        summary,
        ok,
        errors,
        description=note,
        parameters=[_header(), _timeout_header()],
        shape=shape,
    )
    return {**made, "requestBody": _body(request, example)}


def paths() -> dict[str, Any]:
    found = _all_paths()
    for path, methods in found.items():
        if path not in OPEN_PATHS and not is_page(path):
            for operation in methods.values():
                operation["responses"].setdefault("401", _json(_error_shape(path), ERRORS["401"]))
    return found


def _error_shape(path: str) -> str:
    if path.startswith(anthropic.PATHS):
        return "AnthropicErrorAnswer"
    return "OllamaErrorAnswer" if path.startswith(ollama.PATHS) else "ErrorAnswer"


def _all_paths() -> dict[str, Any]:
    return {
        **_openai_paths(),
        **_encode_paths(),
        **_response_paths(),
        **_conversation_paths(),
        **_stored_chat_paths(),
        **_cache_paths(),
        **_session_paths(),
        **_adapter_paths(),
        **_export_paths(),
        **_file_paths(),
        **_batch_paths(),
        **_anthropic_paths(),
        **_ollama_paths(),
        **_own_paths(),
        **_operate_paths(),
    }


def _unstreamed() -> tuple[str, ...]:
    """Errors of requests to the engine that answer whole."""
    return tuple(status for status in ERRORS if status != "409")


def _encode_paths() -> dict[str, Any]:
    ranked = {"model": _NAME, "query": "What colour is the sea?", "documents": ["The sea is blue", "Cats sleep"]}
    pairs = {"model": _NAME, "text_1": "What colour is the sea?", "text_2": ["The sea is blue", "Cats sleep"]}
    embedded = {"model": _NAME, "texts": ["What a fine day", "It rains again"]}
    classed = {"model": _NAME, "input": ["What a fine day", "It rains again"]}
    kinds = (
        ("embed", "A vector for each text, in Cohere's form", embedded, ("/v1", "/v2")),
        ("rerank", "Order documents by their relevance to a query", ranked, ("/v1", "/v2", "")),
        ("score", "Score pairs of texts", pairs, ("/v1", "")),
        ("classify", "Classify texts, or their tokens", classed, ("/v1", "")),
        ("multi-vector", "A vector for each token of each text", classed, ("/v1",)),
        ("sparse-vector", "Weights of vocabulary tokens for each text", classed, ("/v1",)),
    )
    embedded = {"model": _NAME, "input": ["The sea is blue", "The sky is blue"]}
    embed = _operation("encode", "createEmbedding", "A vector for each input", "EmbeddingsAnswer", _unstreamed())
    found = {"/v1/embeddings": {"post": {**embed, "requestBody": _body("EmbeddingsRequest", embedded)}}}
    for name, summary, example, before in kinds:
        for prefix in before:
            operation_id = f"{name.replace('-', '_')}{prefix.removeprefix('/').upper()}"
            kind = "".join(part.capitalize() for part in name.split("-"))
            operation = _operation("encode", operation_id, summary, f"{kind}Answer", _unstreamed())
            body = _body(f"{kind}Request", example)
            found[f"{prefix}/{name}"] = {"post": {**operation, "requestBody": body}}
    return found


def _openai_paths() -> dict[str, Any]:
    chat = {"model": _NAME, "messages": _TURN, "max_completion_tokens": 64}
    text = {"model": _NAME, "prompt": "The sea is", "max_tokens": 16}
    model = [_in_path("model")]
    return {
        "/v1/chat/completions": {
            "post": _generate(
                "createChatCompletion", "Answer a conversation", ("ChatRequest", "ChatAnswer", "ChatChunk"), chat
            ),
            "get": _operation(
                "stored completions",
                "listChatCompletions",
                "List stored completions",
                "StoredList",
                ("400", "404", "500"),
                parameters=[_in_query("model", type="string"), *_page(100, "limit", "order", "after")],
            ),
        },
        "/v1/completions": {
            "post": _generate(
                "createCompletion",
                "Continue a text",
                ("CompletionRequest", "CompletionAnswer", "CompletionChunk"),
                text,
            )
        },
        "/v1/models": {"get": _operation("models", "listModels", "List the served models", _either("ModelList"))},
        "/v1/models/{model}": {
            "get": _operation(
                "models", "retrieveModel", "Describe a model", _either("Model"), ("404",), parameters=model
            )
        },
        "/v1/models/{model}/load": {
            "post": _operation("models", "loadModel", "Load a model now", "Model", ("404", "503"), parameters=model)
        },
        "/v1/models/{model}/unload": {
            "post": _operation(
                "models", "unloadModel", "Unload a model when it is idle", "Model", ("404",), parameters=model
            )
        },
    }


def _response_paths() -> dict[str, Any]:
    one, stored = [_in_path("response_id")], ("400", "404", "500")
    names = ("ResponsesRequest", "ResponseAnswer", "ResponseEvent")
    include = {"type": "array", "items": {"type": "string", "enum": ["message.output_text.logprobs"]}}
    show = [*one, _in_query("include", **include), _in_query("stream", type="boolean")]
    show.append(_in_query("starting_after", type="integer", minimum=0))
    count = _operation("responses", "countResponseTokens", "Count tokens", "InputTokensAnswer", (*BODY_ERRORS, "409"))
    example = {"model": _NAME, "input": "Why is the sky blue?"}
    return {
        "/v1/responses": {
            "post": _generate("createResponse", "Answer, and store the conversation", names, example, note=_TYPED_NOTE)
        },
        "/v1/responses/input_tokens": {"post": {**count, "requestBody": _body("InputTokensRequest", example)}},
        "/v1/responses/{response_id}": {
            "get": _operation(
                "responses", "retrieveResponse", "Get a stored response", "ResponseAnswer", stored, parameters=show
            ),
            "delete": _operation("responses", "deleteResponse", "Delete it", "ResponseDeleted", stored, parameters=one),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _operation(
                "responses",
                "cancelResponse",
                "Cancel a background response",
                "ResponseAnswer",
                (*stored, "409"),
                parameters=one,
            )
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _operation(
                "responses",
                "listInputItems",
                "List the input of a response",
                "InputItemList",
                stored,
                parameters=[*one, *_page(100, "limit", "order", "after"), _in_query("include", **include)],
            )
        },
    }


def _stored_chat_paths() -> dict[str, Any]:
    one, stored, tag = [_in_path("completion_id")], ("404", "500"), "stored completions"
    update = _operation(tag, "updateChatCompletion", "Replace labels", "ChatAnswer", BODY_ERRORS, parameters=one)
    held = [*one, *_page(100, "limit", "order", "after")]
    return {
        "/v1/chat/completions/{completion_id}": {
            "get": _operation(tag, "getChatCompletion", "A stored completion", "ChatAnswer", stored, parameters=one),
            "post": {**update, "requestBody": _body("ChatUpdate", {"metadata": {"topic": "sky"}})},
            "delete": _operation(tag, "deleteChatCompletion", "Delete it", "StoredDeleted", stored, parameters=one),
        },
        "/v1/chat/completions/{completion_id}/messages": {
            "get": _operation(
                tag, "getChatCompletionMessages", "Its messages", "StoredList", ("400", *stored), parameters=held
            )
        },
    }


def _conversation_paths() -> dict[str, Any]:
    one, stored = [_in_path("conversation_id")], ("404", "500")
    include = _in_query("include", type="array", items={"type": "string"})
    item = [*one, _in_path("item_id"), include]
    turn = [{"role": "user", "content": "Why is the sky blue?"}]
    listed = [*one, *_page(100, "limit", "order", "after"), include]
    tag, shown = "conversations", {"description": "The item.", "content": _as_json({"type": "object"})}
    create = _operation(tag, "createConversation", "Begin a conversation", "ConversationAnswer", BODY_ERRORS)
    update = _operation(tag, "updateConversation", "Replace labels", "ConversationAnswer", BODY_ERRORS, parameters=one)
    add = _operation(tag, "createConversationItems", "Add items", "InputItemList", BODY_ERRORS, parameters=one)
    return {
        "/v1/conversations": {"post": {**create, "requestBody": _body("ConversationRequest", {"items": turn})}},
        "/v1/conversations/{conversation_id}": {
            "get": _operation(tag, "getConversation", "Describe it", "ConversationAnswer", stored, parameters=one),
            "post": {**update, "requestBody": _body("ConversationUpdate", {"metadata": {"topic": "sky"}})},
            "delete": _operation(tag, "deleteConversation", "Delete it", "ConversationDeleted", stored, parameters=one),
        },
        "/v1/conversations/{conversation_id}/items": {
            "get": _operation(
                tag, "listConversationItems", "List items", "InputItemList", ("400", *stored), parameters=listed
            ),
            "post": {**add, "requestBody": _body("ConversationItemsRequest", {"items": turn})},
        },
        "/v1/conversations/{conversation_id}/items/{item_id}": {
            "get": _operation(tag, "getConversationItem", "Get an item", shown, ("400", *stored), parameters=item),
            "delete": _operation(
                tag, "deleteConversationItem", "Delete an item", "ConversationAnswer", stored, parameters=item[:2]
            ),
        },
    }


def _file_paths() -> dict[str, Any]:
    one, stored = [_in_path("file_id")], ("404", "500")
    octets = {"description": "The file's bytes.", "content": {"application/octet-stream": {"schema": {}}}}
    listed = [_in_query("purpose", type="string"), *_page(10_000, "limit", "order", "after")]
    upload = _operation("files", "createFile", "Upload a file", "FileAnswer", ("400", "408", "413", "415", "500"))
    form = {"required": True, "content": {"multipart/form-data": {"schema": ref("FileForm")}}}
    return {
        "/v1/files": {
            "post": {**upload, "requestBody": form},
            "get": _operation("files", "listFiles", "List files", "FileList", ("400", "500"), parameters=listed),
        },
        "/v1/files/{file_id}": {
            "get": _operation("files", "retrieveFile", "Describe a file", "FileAnswer", stored, parameters=one),
            "delete": _operation("files", "deleteFile", "Delete a file", "FileDeleted", stored, parameters=one),
        },
        "/v1/files/{file_id}/content": {
            "get": _operation("files", "downloadFile", "Download a file", octets, stored, parameters=one)
        },
    }


def _cache_paths() -> dict[str, Any]:
    one, missing, of_model = _in_path("name"), ("400", "404", "500", "503"), _in_query("model", type="string")
    make = _operation("cache", "createCacheHandle", "Keep a prompt cached", "CreatedHandle", _unstreamed())
    example = {"prompt": "A long manual.", "name": "manual", "ttl_s": 3600}
    of_tenant = _in_query("tenant", type="string")
    return {
        "/v1/cache": {
            "post": {**make, "requestBody": _body("CacheRequest", example)},
            "get": _operation(
                "cache", "listCacheHandles", "Prompts that are kept", "CacheHandles", missing, parameters=[of_model]
            ),
        },
        "/v1/cache/{name}": {
            "get": _operation(
                "cache", "retrieveCacheHandle", "Describe one", "CacheHandle", missing, parameters=[one, of_model]
            ),
            "delete": _operation(
                *("cache", "deleteCacheHandle", "Keep it no longer", "DeletedHandle", missing),
                parameters=[one, of_model, of_tenant],
            ),
        },
    }


def _adapter_paths() -> dict[str, Any]:
    one, of_model, errors = _in_path("name"), _in_query("model", type="string"), ("403", "404", "500", "503")
    made = _operation("adapters", "addAdapter", "Add a LoRA adapter", "AdapterInfo", (*BODY_ERRORS, "403", "409"))
    example = {"name": "pirate", "path": "/srv/adapters/pirate"}
    said = {"description": "A sentence.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    load = _operation("adapters", "loadLora", "Add one, as with vLLM", said, (*BODY_ERRORS, "403", "409"))
    unload = _operation("adapters", "unloadLora", "Remove one, as with vLLM", said, (*BODY_ERRORS, "403"))
    lora = {"lora_name": "pirate", "lora_path": "/srv/adapters/pirate"}
    return {
        "/v1/adapters": {
            "post": {**made, "requestBody": _body("AdapterRequest", example)},
            "get": _operation(
                *("adapters", "listAdapters", "List them", "AdapterInfoList", ("400", "404", "500", "503")),
                parameters=[of_model],
            ),
        },
        "/v1/adapters/{name}": {
            "get": _operation(
                "adapters", "retrieveAdapter", "Describe one", "AdapterInfo", errors[1:], parameters=[one, of_model]
            ),
            "delete": _operation(
                "adapters", "deleteAdapter", "Remove one", "DeletedAdapter", errors, parameters=[one, of_model]
            ),
        },
        "/v1/load_lora_adapter": {"post": {**load, "requestBody": _body("LoadLoraRequest", lora)}},
        "/v1/unload_lora_adapter": {"post": {**unload, "requestBody": _body("UnloadLoraRequest", lora)}},
    }


def _export_paths() -> dict[str, Any]:
    octets = {"description": "The signed file.", "content": {"application/octet-stream": {"schema": {}}}}
    errors, model = ("400", "403", "404", "409", "429", "500", "503"), _in_query("model", type="string")
    body = {"required": True, "content": {"application/octet-stream": {"schema": {}}}}
    kinds: tuple[tuple[str, str, str, str, str, list[Any], Any], ...] = (
        ("cache", "name", "CacheHandle", "a kept prompt", "ImportedHandle", [model], _in_query("name", type="string")),
        ("sessions", "session_id", "Session", "a session", "SessionAnswer", [], _in_query("id", type="string")),
    )
    paths: dict[str, Any] = {}
    for tag, at, what, shown, answer, of_model, renamed in kinds:
        one = {"parameters": [_in_path(at), *of_model]}
        post = _operation(
            tag, f"import{what}", f"Import {shown} from a file", answer, (*errors, "408"), parameters=[model, renamed]
        )
        paths[f"/v1/{tag}/{{{at}}}/export"] = {
            "get": _operation(tag, f"export{what}", f"Export {shown} as a signed file", octets, errors, **one)
        }
        paths[f"/v1/{tag}/import"] = {"post": {**post, "requestBody": body}}
    return paths


def _session_paths() -> dict[str, Any]:
    one, missing = [_in_path("session_id")], ("400", "404", "500", "503")
    make = _operation("sessions", "createSession", "Begin a session", "SessionAnswer", (*BODY_ERRORS, "429"))
    turn = _operation("sessions", "createTurn", "Continue a session", "ChatAnswer", tuple(ERRORS), parameters=one)
    example = {"system": "Answer in one sentence.", "ttl_s": 3600}
    hello = {"messages": [{"role": "user", "content": "Why do boats float?"}], "max_tokens": 64}
    change = {"requestBody": {**_body("SessionChange", {"ttl_s": 3600}), "required": False}, "parameters": one}
    paths: dict[str, Any] = {
        "/v1/sessions": {
            "post": {**make, "requestBody": _body("SessionRequest", example)},
            "get": _operation(
                *("sessions", "listSessions", "List sessions", "SessionList", ("400", "404", "500")),
                parameters=_page(1000, "limit", "order", "after"),
            ),
        },
        "/v1/sessions/{session_id}": {
            "get": _operation(
                *("sessions", "retrieveSession", "Describe a session", "SessionAnswer", missing), parameters=one
            ),
            "delete": _operation(
                *("sessions", "deleteSession", "End a session", "SessionDeleted", missing), parameters=one
            ),
        },
        "/v1/sessions/{session_id}/turns": {"post": {**turn, "requestBody": _body("ChatRequest", hello)}},
    }
    for action, what in (("renew", "Begin its time to live again"), ("fork", "A second session with the same past")):
        post = _operation("sessions", f"{action}Session", what, "SessionAnswer", (*BODY_ERRORS, "429"))
        paths[f"/v1/sessions/{{session_id}}/{action}"] = {"post": {**post, **change}}
    return paths


def _batch_paths() -> dict[str, Any]:
    one, stored = [_in_path("batch_id")], ("404", "500")
    example = {"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    create = _operation("batches", "createBatch", "Run a file of requests", "BatchAnswer", BODY_ERRORS)
    listed = _page(100, "limit", "after")
    return {
        "/v1/batches": {
            "post": {**create, "requestBody": _body("BatchRequest", example)},
            "get": _operation("batches", "listBatches", "List batches", "BatchList", ("400", "500"), parameters=listed),
        },
        "/v1/batches/{batch_id}": {
            "get": _operation("batches", "retrieveBatch", "Describe a batch", "BatchAnswer", stored, parameters=one)
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation(
                "batches", "cancelBatch", "Cancel a batch", "BatchAnswer", (*stored, "409"), parameters=one
            )
        },
    }


def _anthropic_paths() -> dict[str, Any]:
    shape = "AnthropicErrorAnswer"
    ask = {"model": _NAME, "messages": _TURN}
    names = ("MessagesRequest", "MessageAnswer", "MessageEvent")
    count = _operation("anthropic", "countMessageTokens", "Count tokens", "CountTokensAnswer", BODY_ERRORS, shape=shape)
    return {
        "/v1/messages": {
            "post": _generate(
                "createMessage", "Anthropic: answer", names, {**ask, "max_tokens": 64}, note=_TYPED_NOTE, shape=shape
            )
        },
        "/v1/messages/count_tokens": {"post": {**count, "requestBody": _body("CountTokensRequest", ask)}},
    }


def _ollama_paths() -> dict[str, Any]:
    managed = (*BODY_ERRORS, "403", "404", "409")
    shape, lines = "OllamaErrorAnswer", {"note": _LINES_NOTE, "media_type": "application/x-ndjson"}
    chat = ("OllamaChatRequest", "OllamaAnswer", "OllamaAnswer")
    generate = ("OllamaGenerateRequest", "OllamaAnswer", "OllamaAnswer")
    asked, prompted = {"model": _NAME, "messages": _TURN}, {"model": _NAME, "prompt": "Why is the sky blue?"}
    pulled = _json("OllamaPullStatus", "The last status, or a stream of them.")
    pulled["content"][lines["media_type"]] = {"schema": ref("OllamaPullStatus")}
    pull = _operation("ollama", "ollamaPull", "Download a model", pulled, managed, shape=shape)
    delete = _operation("ollama", "ollamaDelete", "Delete a model", "OllamaPullStatus", managed, shape=shape)
    names, errors = ("OllamaEmbedAnswer", "OllamaEmbeddingsAnswer"), _unstreamed()
    embed = _operation("ollama", "ollamaEmbed", "Ollama: vectors", names[0], errors, shape=shape)
    older = _operation("ollama", "ollamaEmbeddings", "Ollama: one vector", names[1], errors, shape=shape)
    embedded = {"model": _NAME, "input": "Why is the sky blue?"}
    show = _operation("ollama", "ollamaShow", "Describe the model", "OllamaShowAnswer", BODY_ERRORS, shape=shape)
    return {
        "/api/chat": {"post": _generate("ollamaChat", "Ollama: answer", chat, asked, shape=shape, **lines)},
        "/api/generate": {
            "post": _generate("ollamaGenerate", "Ollama: continue a prompt", generate, prompted, shape=shape, **lines)
        },
        "/api/embed": {"post": {**embed, "requestBody": _body("OllamaEmbedRequest", embedded)}},
        "/api/embeddings": {"post": {**older, "requestBody": _body("OllamaEmbeddingsRequest", prompted)}},
        "/api/show": {"post": {**show, "requestBody": _body("OllamaShowRequest", {"model": _NAME})}},
        "/api/pull": {"post": {**pull, "requestBody": _body("OllamaPullRequest", {"model": _NAME})}},
        "/api/delete": {"delete": {**delete, "requestBody": _body("OllamaDeleteRequest", {"model": _NAME})}},
        **_created_paths(pulled, managed, shape),
        "/api/tags": {"get": _operation("ollama", "ollamaTags", "List the served models", "OllamaModels")},
        "/api/ps": {"get": _operation("ollama", "ollamaPs", "List the loaded models", "OllamaModels")},
        "/api/version": {"get": _operation("ollama", "ollamaVersion", "The server's version", "OllamaVersion")},
    }


def _created_paths(progress: dict[str, Any], errors: tuple[str, ...], shape: str) -> dict[str, Any]:
    create = _operation("ollama", "ollamaCreate", "Make a model of a served one", progress, errors, shape=shape)
    copy = _operation("ollama", "ollamaCopy", "Give a model a second name", {"description": "OK"}, errors, shape=shape)
    example = {"model": "pirate", "from": _NAME, "system": "You are a pirate.", "parameters": {"temperature": 0.7}}
    octets = {"required": True, "content": {"application/octet-stream": {"schema": {}}}}
    digest = [_in_path("digest")]
    put = _operation(
        *("ollama", "ollamaPutBlob", "Upload a file of an adapter", {"description": "It was here already."}),
        ("400", "403", "408", "413", "500"),
        shape=shape,
        requestBody=octets,
        parameters=digest,
    )
    put["responses"]["201"] = {"description": "It was received."}
    has = _operation("ollama", "ollamaHasBlob", "Whether a file is here", {"description": "It is."}, parameters=digest)
    has["responses"]["404"] = {"description": "It is not."}
    has["responses"]["400"] = has["responses"]["403"] = {"description": "The digest is wrong, or the key."}
    return {
        "/api/create": {"post": {**create, "requestBody": _body("OllamaCreateRequest", example)}},
        "/api/copy": {
            "post": {**copy, "requestBody": _body("OllamaCopyRequest", {"source": _NAME, "destination": "x"})}
        },
        "/api/blobs/{digest}": {"post": put, "head": has},
    }


def _series() -> list[dict[str, Any]]:
    window = {"type": "integer", "minimum": 1, "maximum": MAX_WINDOW_S, "default": 300}
    step = {"type": "integer", "minimum": 1, "maximum": MAX_WINDOW_S, "default": 5}
    return [
        {"name": "window", "in": "query", "description": "Seconds to look back.", "schema": window},
        {"name": "step", "in": "query", "description": "Seconds per point, at most the window.", "schema": step},
        _of_model(),
    ]


def _of_model() -> dict[str, Any]:
    text = "Which model's figures, by name or alias; by default those of the first."
    return {"name": "model", "in": "query", "description": text, "schema": {"type": "string"}}


def _listed() -> dict[str, Any]:
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": MAX_LISTED}
    return {"name": "limit", "in": "query", "description": "Only the longest running ones.", "schema": limit}


def _last() -> list[dict[str, Any]]:
    last = {"type": "integer", "minimum": 1, "maximum": 4096, "default": 200}
    return [{"name": "last", "in": "query", "description": "Number of steps.", "schema": last}, _of_model()]


def _price() -> list[dict[str, Any]]:
    price = {"type": "number", "minimum": 0, "exclusiveMaximum": 1_000_000}
    text = "Dollars per hour, instead of --price-per-hour; only on servers without keys."
    return [{"name": "price", "in": "query", "description": text, "schema": price}, _of_model()]


def _own_paths() -> dict[str, Any]:
    one, unknown = [_in_path("request_id")], ("404", "503")
    either = {"oneOf": [ref("RunningRequest"), ref("RequestOutcome")]}
    described = {"description": "What it has done so far, or how it ended.", "content": _as_json(either)}
    explained = {"description": "Its stages, in figures and in sentences.", "content": _as_json({"type": "object"})}
    figures = {"description": "Present figures and series.", "content": _as_json({"type": "object"})}
    one_event = {"text/event-stream": {"schema": _event("KvEvent")}}
    octets = {"description": "The sealed part.", "content": {"application/octet-stream": {"schema": {}}}}
    kv_events = {"description": "Server-sent events without end; the first is a snapshot.", "content": one_event}
    encode = _operation("text", "tokenize", "Text or messages to token ids", "TokenizeAnswer", BODY_ERRORS)
    decode = _operation("text", "detokenize", "Token ids to text", "DetokenizeAnswer", BODY_ERRORS)
    return {
        "/tokenize": {"post": {**encode, "requestBody": _body("TokenizeRequest", {"prompt": "The sea is"})}},
        "/tokenizer_info": {
            "get": _operation(
                *("text", "tokenizerInfo", "Describe the tokenizer", "TokenizerInfo"),
                ("400", "404"),
                parameters=[_of_model()],
            )
        },
        "/detokenize": {"post": {**decode, "requestBody": _body("DetokenizeRequest", {"tokens": [504, 3217, 314]})}},
        "/v1/stats": {
            "get": _operation(
                "operate",
                "stats",
                "Figures and time series for dashboards",
                figures,
                ("400", "404"),
                parameters=_series(),
            )
        },
        "/v1/load": {
            "get": _operation(
                "operate",
                "load",
                "How busy this server is, for gateways",
                "Load",
                ("400", "404"),
                parameters=[_of_model()],
            )
        },
        "/v1/kv/events": {
            "get": _operation(
                *("operate", "kvEvents", "Which KV blocks are cached, for gateways", kv_events),
                ("400", "403", "404", "503"),
                parameters=[_of_model()],
            )
        },
        "/v1/kv/blocks": {
            "post": {
                **_operation(
                    *("operate", "kvBlocks", "KV blocks of a prompt, for other replicas", octets),
                    ("400", "403", "404", "409", "413", "429", "503"),
                    parameters=[_of_model()],
                ),
                "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}},
            }
        },
        "/v1/requests": {
            "get": _operation(
                "operate", "listRequests", "List running requests", "RunningRequests", ("400",), parameters=[_listed()]
            )
        },
        "/v1/steps": {
            "get": _operation(
                *("operate", "steps", "The engine's last steps", figures),
                ("400", "403", "404", "503"),
                parameters=_last(),
            )
        },
        "/v1/cost": {
            "get": _operation(
                *("operate", "cost", "What tokens cost on this machine", figures),
                ("400", "403", "404"),
                parameters=_price(),
            )
        },
        "/v1/requests/{request_id}": {
            "get": _operation("operate", "retrieveRequest", "Describe a request", described, unknown, parameters=one),
            "delete": _operation("operate", "cancelRequest", "Cancel it", "CancelledRequest", unknown, parameters=one),
        },
        "/v1/requests/{request_id}/explain": {
            "get": _operation(
                "operate", "explainRequest", "Why it took as long as it did", explained, unknown, parameters=one
            )
        },
        "/v1/requests/{request_id}/cancel": {
            "post": _operation(
                "operate", "cancelRequestByPost", "Cancel it", "CancelledRequest", unknown, parameters=one
            )
        },
    }


def _operate_paths() -> dict[str, Any]:
    text = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    html = {"description": "This page.", "content": {"text/html": {"schema": {"type": "string"}}}}
    json = {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}}
    ready = _operation("operate", "ready", "Readiness: the engine answers requests", "Health")
    ready["responses"]["503"] = _json("Health", "Not ready, with the reason.")
    return {
        "/health": {"get": _operation("operate", "health", "Liveness: the process runs", "Health")},
        "/ready": {"get": ready},
        "/metrics": {"get": _operation("operate", "metrics", "Metrics for Prometheus", text)},
        "/docs": {"get": _operation("operate", "docs", "API documentation as a page", html)},
        "/openapi.json": {"get": _operation("operate", "openapi", "API description as OpenAPI", json)},
    }
