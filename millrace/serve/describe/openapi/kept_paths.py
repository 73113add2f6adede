"""Paths of what a server keeps: responses, conversations, completions, handles, sessions, files, batches."""

from __future__ import annotations

from typing import Any

from millrace.serve.describe.openapi.operations import (
    BODY_ERRORS,
    ERRORS,
    MODEL,
    TYPED_NOTE,
    as_json,
    body_of,
    generation,
    in_path,
    in_query,
    operation,
    page_of,
    ref,
    unstreamed,
)


def response_paths() -> dict[str, Any]:
    one, stored = [in_path("response_id")], ("400", "404", "500")
    names = ("ResponsesRequest", "ResponseAnswer", "ResponseEvent")
    include = {"type": "array", "items": {"type": "string", "enum": ["message.output_text.logprobs"]}}
    show = [*one, in_query("include", **include), in_query("stream", type="boolean")]
    show.append(in_query("starting_after", type="integer", minimum=0))
    count = operation("responses", "countResponseTokens", "Count tokens", "InputTokensAnswer", (*BODY_ERRORS, "409"))
    example = {"model": MODEL, "input": "Why is the sky blue?"}
    return {
        "/v1/responses": {
            "post": generation("createResponse", "Answer, and store the conversation", names, example, note=TYPED_NOTE)
        },
        "/v1/responses/input_tokens": {"post": {**count, "requestBody": body_of("InputTokensRequest", example)}},
        "/v1/responses/{response_id}": {
            "get": operation(
                "responses", "retrieveResponse", "Get a stored response", "ResponseAnswer", stored, parameters=show
            ),
            "delete": operation("responses", "deleteResponse", "Delete it", "ResponseDeleted", stored, parameters=one),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": operation(
                "responses",
                "cancelResponse",
                "Cancel a background response",
                "ResponseAnswer",
                (*stored, "409"),
                parameters=one,
            )
        },
        "/v1/responses/{response_id}/input_items": {
            "get": operation(
                "responses",
                "listInputItems",
                "List the input of a response",
                "InputItemList",
                stored,
                parameters=[*one, *page_of(100, "limit", "order", "after"), in_query("include", **include)],
            )
        },
    }


def stored_chat_paths() -> dict[str, Any]:
    one, stored, tag = [in_path("completion_id")], ("404", "500"), "stored completions"
    update = operation(tag, "updateChatCompletion", "Replace labels", "ChatAnswer", BODY_ERRORS, parameters=one)
    held = [*one, *page_of(100, "limit", "order", "after")]
    return {
        "/v1/chat/completions/{completion_id}": {
            "get": operation(tag, "getChatCompletion", "A stored completion", "ChatAnswer", stored, parameters=one),
            "post": {**update, "requestBody": body_of("ChatUpdate", {"metadata": {"topic": "sky"}})},
            "delete": operation(tag, "deleteChatCompletion", "Delete it", "StoredDeleted", stored, parameters=one),
        },
        "/v1/chat/completions/{completion_id}/messages": {
            "get": operation(
                tag, "getChatCompletionMessages", "Its messages", "StoredList", ("400", *stored), parameters=held
            )
        },
    }


def conversation_paths() -> dict[str, Any]:
    one, stored = [in_path("conversation_id")], ("404", "500")
    include = in_query("include", type="array", items={"type": "string"})
    item = [*one, in_path("item_id"), include]
    turn = [{"role": "user", "content": "Why is the sky blue?"}]
    listed = [*one, *page_of(100, "limit", "order", "after"), include]
    tag, shown = "conversations", {"description": "The item.", "content": as_json({"type": "object"})}
    create = operation(tag, "createConversation", "Begin a conversation", "ConversationAnswer", BODY_ERRORS)
    update = operation(tag, "updateConversation", "Replace labels", "ConversationAnswer", BODY_ERRORS, parameters=one)
    add = operation(tag, "createConversationItems", "Add items", "InputItemList", BODY_ERRORS, parameters=one)
    return {
        "/v1/conversations": {"post": {**create, "requestBody": body_of("ConversationRequest", {"items": turn})}},
        "/v1/conversations/{conversation_id}": {
            "get": operation(tag, "getConversation", "Describe it", "ConversationAnswer", stored, parameters=one),
            "post": {**update, "requestBody": body_of("ConversationUpdate", {"metadata": {"topic": "sky"}})},
            "delete": operation(tag, "deleteConversation", "Delete it", "ConversationDeleted", stored, parameters=one),
        },
        "/v1/conversations/{conversation_id}/items": {
            "get": operation(
                tag, "listConversationItems", "List items", "InputItemList", ("400", *stored), parameters=listed
            ),
            "post": {**add, "requestBody": body_of("ConversationItemsRequest", {"items": turn})},
        },
        "/v1/conversations/{conversation_id}/items/{item_id}": {
            "get": operation(tag, "getConversationItem", "Get an item", shown, ("400", *stored), parameters=item),
            "delete": operation(
                tag, "deleteConversationItem", "Delete an item", "ConversationAnswer", stored, parameters=item[:2]
            ),
        },
    }


def cache_paths() -> dict[str, Any]:
    one, missing, of_model = in_path("name"), ("400", "404", "500", "503"), in_query("model", type="string")
    make = operation("cache", "createCacheHandle", "Keep a prompt cached", "CreatedHandle", unstreamed())
    manual = "The manual of the pump. 1. Close the inlet before you open the housing. 2. Turn the shaft once a month."
    example = {"prompt": manual, "name": "manual", "ttl_s": 3600}
    of_tenant = in_query("tenant", type="string")
    forget = ("cache", "forgetTenant", "Forget what a tenant has in the cache (operators)", "TenantForgotten")
    refused = ("400", "403", "409", "500", "503")
    return {
        "/v1/tenants/{tenant}/cache": {"delete": operation(*forget, refused, parameters=[in_path("tenant")])},
        "/v1/cache": {
            "post": {**make, "requestBody": body_of("CacheRequest", example)},
            "get": operation(
                "cache", "listCacheHandles", "Prompts that are kept", "CacheHandles", missing, parameters=[of_model]
            ),
        },
        "/v1/cache/{name}": {
            "get": operation(
                "cache", "retrieveCacheHandle", "Describe one", "CacheHandle", missing, parameters=[one, of_model]
            ),
            "delete": operation(
                "cache",
                "deleteCacheHandle",
                "Keep it no longer",
                "DeletedHandle",
                missing,
                parameters=[one, of_model, of_tenant],
            ),
        },
    }


def session_paths() -> dict[str, Any]:
    one, missing = [in_path("session_id")], ("400", "404", "500", "503")
    make = operation("sessions", "createSession", "Begin a session", "SessionAnswer", (*BODY_ERRORS, "429"))
    turn = operation("sessions", "createTurn", "Continue a session", "ChatAnswer", tuple(ERRORS), parameters=one)
    example = {"system": "Answer in one sentence.", "ttl_s": 3600}
    hello = {"messages": [{"role": "user", "content": "Why do boats float?"}], "max_tokens": 64}
    change = {"requestBody": {**body_of("SessionChange", {"ttl_s": 3600}), "required": False}, "parameters": one}
    paths: dict[str, Any] = {
        "/v1/sessions": {
            "post": {**make, "requestBody": body_of("SessionRequest", example)},
            "get": operation(
                "sessions",
                "listSessions",
                "List sessions",
                "SessionList",
                ("400", "404", "500"),
                parameters=page_of(1000, "limit", "order", "after"),
            ),
        },
        "/v1/sessions/{session_id}": {
            "get": operation(
                "sessions", "retrieveSession", "Describe a session", "SessionAnswer", missing, parameters=one
            ),
            "delete": operation(
                "sessions", "deleteSession", "End a session", "SessionDeleted", missing, parameters=one
            ),
        },
        "/v1/sessions/{session_id}/turns": {"post": {**turn, "requestBody": body_of("ChatRequest", hello)}},
    }
    for action, what in (("renew", "Begin its time to live again"), ("fork", "A second session with the same past")):
        post = operation("sessions", f"{action}Session", what, "SessionAnswer", (*BODY_ERRORS, "429"))
        paths[f"/v1/sessions/{{session_id}}/{action}"] = {"post": {**post, **change}}
    return paths


def export_paths() -> dict[str, Any]:
    octets = {"description": "The signed file.", "content": {"application/octet-stream": {"schema": {}}}}
    errors, model = ("400", "403", "404", "409", "429", "500", "503"), in_query("model", type="string")
    body = {"required": True, "content": {"application/octet-stream": {"schema": {}}}}
    kinds: tuple[tuple[str, str, str, str, str, list[Any], Any], ...] = (
        ("cache", "name", "CacheHandle", "a kept prompt", "ImportedHandle", [model], in_query("name", type="string")),
        ("sessions", "session_id", "Session", "a session", "SessionAnswer", [], in_query("id", type="string")),
    )
    paths: dict[str, Any] = {}
    for tag, at, what, shown, answer, of_model, renamed in kinds:
        one = {"parameters": [in_path(at), *of_model]}
        post = operation(
            tag, f"import{what}", f"Import {shown} from a file", answer, (*errors, "408"), parameters=[model, renamed]
        )
        paths[f"/v1/{tag}/{{{at}}}/export"] = {
            "get": operation(tag, f"export{what}", f"Export {shown} as a signed file", octets, errors, **one)
        }
        paths[f"/v1/{tag}/import"] = {"post": {**post, "requestBody": body}}
    return paths


def file_paths() -> dict[str, Any]:
    one, stored = [in_path("file_id")], ("404", "500")
    octets = {"description": "The file's bytes.", "content": {"application/octet-stream": {"schema": {}}}}
    listed = [in_query("purpose", type="string"), *page_of(10_000, "limit", "order", "after")]
    upload = operation("files", "createFile", "Upload a file", "FileAnswer", ("400", "408", "413", "415", "500"))
    form = {"required": True, "content": {"multipart/form-data": {"schema": ref("FileForm")}}}
    return {
        "/v1/files": {
            "post": {**upload, "requestBody": form},
            "get": operation("files", "listFiles", "List files", "FileList", ("400", "500"), parameters=listed),
        },
        "/v1/files/{file_id}": {
            "get": operation("files", "retrieveFile", "Describe a file", "FileAnswer", stored, parameters=one),
            "delete": operation("files", "deleteFile", "Delete a file", "FileDeleted", stored, parameters=one),
        },
        "/v1/files/{file_id}/content": {
            "get": operation("files", "downloadFile", "Download a file", octets, stored, parameters=one)
        },
    }


def batch_paths() -> dict[str, Any]:
    one, stored = [in_path("batch_id")], ("404", "500")
    example = {"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    create = operation("batches", "createBatch", "Run a file of requests", "BatchAnswer", BODY_ERRORS)
    listed = page_of(100, "limit", "after")
    return {
        "/v1/batches": {
            "post": {**create, "requestBody": body_of("BatchRequest", example)},
            "get": operation("batches", "listBatches", "List batches", "BatchList", ("400", "500"), parameters=listed),
        },
        "/v1/batches/{batch_id}": {
            "get": operation("batches", "retrieveBatch", "Describe a batch", "BatchAnswer", stored, parameters=one)
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": operation(
                "batches", "cancelBatch", "Cancel a batch", "BatchAnswer", (*stored, "409"), parameters=one
            )
        },
    }
