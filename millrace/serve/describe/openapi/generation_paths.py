"""Paths that generate or encode, in each dialect, and the models that they name."""

from __future__ import annotations

from typing import Any

from millrace.serve.describe.openapi.operations import (
    BODY_ERRORS,
    LINES_NOTE,
    MODEL,
    TURN,
    TYPED_NOTE,
    body_of,
    either_of,
    generation,
    in_path,
    in_query,
    json_of,
    operation,
    page_of,
    ref,
    unstreamed,
)


def openai_paths() -> dict[str, Any]:
    chat = {"model": MODEL, "messages": TURN, "max_completion_tokens": 64}
    text = {"model": MODEL, "prompt": "The sea is", "max_tokens": 16}
    model = [in_path("model")]
    return {
        "/v1/chat/completions": {
            "post": generation(
                "createChatCompletion", "Answer a conversation", ("ChatRequest", "ChatAnswer", "ChatChunk"), chat
            ),
            "get": operation(
                "stored completions",
                "listChatCompletions",
                "List stored completions",
                "StoredList",
                ("400", "404", "500"),
                parameters=[in_query("model", type="string"), *page_of(100, "limit", "order", "after")],
            ),
        },
        "/v1/completions": {
            "post": generation(
                "createCompletion",
                "Continue a text",
                ("CompletionRequest", "CompletionAnswer", "CompletionChunk"),
                text,
            )
        },
        "/v1/models": {"get": operation("models", "listModels", "List the served models", either_of("ModelList"))},
        "/v1/models/{model}": {
            "get": operation(
                "models", "retrieveModel", "Describe a model", either_of("Model"), ("404",), parameters=model
            )
        },
        "/v1/models/{model}/load": {
            "post": operation("models", "loadModel", "Load a model now", "Model", ("404", "503"), parameters=model)
        },
        "/v1/models/{model}/unload": {
            "post": operation(
                "models", "unloadModel", "Unload a model when it is idle", "Model", ("404",), parameters=model
            )
        },
    }


def encode_paths() -> dict[str, Any]:
    ranked = {"model": MODEL, "query": "What colour is the sea?", "documents": ["The sea is blue", "Cats sleep"]}
    pairs = {"model": MODEL, "text_1": "What colour is the sea?", "text_2": ["The sea is blue", "Cats sleep"]}
    embedded = {"model": MODEL, "texts": ["What a fine day", "It rains again"]}
    classed = {"model": MODEL, "input": ["What a fine day", "It rains again"]}
    kinds = (
        ("embed", "A vector for each text, in Cohere's form", embedded, ("/v1", "/v2")),
        ("rerank", "Order documents by their relevance to a query", ranked, ("/v1", "/v2", "")),
        ("score", "Score pairs of texts", pairs, ("/v1", "")),
        ("classify", "Classify texts, or their tokens", classed, ("/v1", "")),
        ("multi-vector", "A vector for each token of each text", classed, ("/v1",)),
        ("sparse-vector", "Weights of vocabulary tokens for each text", classed, ("/v1",)),
    )
    embedded = {"model": MODEL, "input": ["The sea is blue", "The sky is blue"]}
    embed = operation("encode", "createEmbedding", "A vector for each input", "EmbeddingsAnswer", unstreamed())
    found = {"/v1/embeddings": {"post": {**embed, "requestBody": body_of("EmbeddingsRequest", embedded)}}}
    for name, summary, example, before in kinds:
        for prefix in before:
            operation_id = f"{name.replace('-', '_')}{prefix.removeprefix('/').upper()}"
            kind = "".join(part.capitalize() for part in name.split("-"))
            made = operation("encode", operation_id, summary, f"{kind}Answer", unstreamed())
            body = body_of(f"{kind}Request", example)
            found[f"{prefix}/{name}"] = {"post": {**made, "requestBody": body}}
    return found


def anthropic_paths() -> dict[str, Any]:
    shape = "AnthropicErrorAnswer"
    ask = {"model": MODEL, "messages": TURN}
    names = ("MessagesRequest", "MessageAnswer", "MessageEvent")
    count = operation("anthropic", "countMessageTokens", "Count tokens", "CountTokensAnswer", BODY_ERRORS, shape=shape)
    return {
        "/v1/messages": {
            "post": generation(
                "createMessage", "Anthropic: answer", names, {**ask, "max_tokens": 64}, note=TYPED_NOTE, shape=shape
            )
        },
        "/v1/messages/count_tokens": {"post": {**count, "requestBody": body_of("CountTokensRequest", ask)}},
    }


def ollama_paths() -> dict[str, Any]:
    managed = (*BODY_ERRORS, "403", "404", "409")
    shape, lines = "OllamaErrorAnswer", {"note": LINES_NOTE, "media_type": "application/x-ndjson"}
    chat = ("OllamaChatRequest", "OllamaAnswer", "OllamaAnswer")
    generate = ("OllamaGenerateRequest", "OllamaAnswer", "OllamaAnswer")
    asked, prompted = {"model": MODEL, "messages": TURN}, {"model": MODEL, "prompt": "Why is the sky blue?"}
    pulled = json_of("OllamaPullStatus", "The last status, or a stream of them.")
    pulled["content"][lines["media_type"]] = {"schema": ref("OllamaPullStatus")}
    pull = operation("ollama", "ollamaPull", "Download a model", pulled, managed, shape=shape)
    delete = operation("ollama", "ollamaDelete", "Delete a model", "OllamaPullStatus", managed, shape=shape)
    names, errors = ("OllamaEmbedAnswer", "OllamaEmbeddingsAnswer"), unstreamed()
    embed = operation("ollama", "ollamaEmbed", "Ollama: vectors", names[0], errors, shape=shape)
    older = operation("ollama", "ollamaEmbeddings", "Ollama: one vector", names[1], errors, shape=shape)
    embedded = {"model": MODEL, "input": "Why is the sky blue?"}
    show = operation("ollama", "ollamaShow", "Describe the model", "OllamaShowAnswer", BODY_ERRORS, shape=shape)
    return {
        "/api/chat": {"post": generation("ollamaChat", "Ollama: answer", chat, asked, shape=shape, **lines)},
        "/api/generate": {
            "post": generation("ollamaGenerate", "Ollama: continue a prompt", generate, prompted, shape=shape, **lines)
        },
        "/api/embed": {"post": {**embed, "requestBody": body_of("OllamaEmbedRequest", embedded)}},
        "/api/embeddings": {"post": {**older, "requestBody": body_of("OllamaEmbeddingsRequest", prompted)}},
        "/api/show": {"post": {**show, "requestBody": body_of("OllamaShowRequest", {"model": MODEL})}},
        "/api/pull": {"post": {**pull, "requestBody": body_of("OllamaPullRequest", {"model": MODEL})}},
        "/api/delete": {"delete": {**delete, "requestBody": body_of("OllamaDeleteRequest", {"model": MODEL})}},
        **created_paths(pulled, managed, shape),
        "/api/tags": {"get": operation("ollama", "ollamaTags", "List the served models", "OllamaModels")},
        "/api/ps": {"get": operation("ollama", "ollamaPs", "List the loaded models", "OllamaModels")},
        "/api/version": {"get": operation("ollama", "ollamaVersion", "The server's version", "OllamaVersion")},
    }


def created_paths(progress: dict[str, Any], errors: tuple[str, ...], shape: str) -> dict[str, Any]:
    create = operation("ollama", "ollamaCreate", "Make a model of a served one", progress, errors, shape=shape)
    copy = operation("ollama", "ollamaCopy", "Give a model a second name", {"description": "OK"}, errors, shape=shape)
    example = {"model": "pirate", "from": MODEL, "system": "You are a pirate.", "parameters": {"temperature": 0.7}}
    octets = {"required": True, "content": {"application/octet-stream": {"schema": {}}}}
    digest = [in_path("digest")]
    put = operation(
        "ollama",
        "ollamaPutBlob",
        "Upload a file of an adapter",
        {"description": "It was here already."},
        ("400", "403", "408", "413", "500"),
        shape=shape,
        requestBody=octets,
        parameters=digest,
    )
    put["responses"]["201"] = {"description": "It was received."}
    has = operation("ollama", "ollamaHasBlob", "Whether a file is here", {"description": "It is."}, parameters=digest)
    has["responses"]["404"] = {"description": "It is not."}
    has["responses"]["400"] = has["responses"]["403"] = {"description": "The digest is wrong, or the key."}
    return {
        "/api/create": {"post": {**create, "requestBody": body_of("OllamaCreateRequest", example)}},
        "/api/copy": {
            "post": {**copy, "requestBody": body_of("OllamaCopyRequest", {"source": MODEL, "destination": "x"})}
        },
        "/api/blobs/{digest}": {"post": put, "head": has},
    }
