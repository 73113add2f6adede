"""What the operations of the OpenAPI document are made of: parameters, bodies, answers and errors."""

from __future__ import annotations

from typing import Any

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
TYPED_NOTE = "With `stream`: server-sent events, with the type in `event: ` and in the data."
LINES_NOTE = "Streams unless `stream` is false: one JSON object per line, the last with `done`."

MODEL = "smollm2-135m-instruct"
TURN = [{"role": "user", "content": "Why is the sky blue?"}]
_LINK = "#/components/schemas/"


def ref(name: str) -> dict[str, str]:
    return {"$ref": _LINK + name}


def json_of(name: str, description: str = "OK") -> dict[str, Any]:
    return {"description": description, "content": as_json(ref(name))}


def either_of(name: str) -> dict[str, Any]:
    """In OpenAI's form, or in Anthropic's for clients that send the header `anthropic-version`."""
    schema = {"anyOf": [ref(name), ref(f"Anthropic{name}")]}
    return {"description": "In Anthropic's form with the header `anthropic-version`.", "content": as_json(schema)}


def as_json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _errors(statuses: tuple[str, ...], shape: str) -> dict[str, Any]:
    return {status: json_of(shape, ERRORS[status]) for status in statuses}


def body_of(name: str, example: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": ref(name), "example": example}}}


def operation(
    tag: str, operation: str, summary: str, answer: Any, errors: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """`answer` is a schema name or a whole response object; `shape` is the schema of errors."""
    shape = more.pop("shape", "ErrorAnswer")
    ok = json_of(answer) if isinstance(answer, str) else answer
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


def in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def in_query(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def page_of(most: int, *names: str) -> list[dict[str, Any]]:
    known = {
        "limit": in_query("limit", type="integer", minimum=1, maximum=most),
        "order": in_query("order", type="string", enum=["asc", "desc"]),
        "after": in_query("after", type="string"),
    }
    return [known[name] for name in names]


def event_of(name: str) -> dict[str, Any]:
    """One server-sent event as an object; its data is JSON in a string."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(name)}
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def generation(
    name: str,
    summary: str,
    names: tuple[str, str, str],
    example: dict[str, Any],
    *,
    note: str = _STREAM_NOTE,
    media_type: str = "text/event-stream",
    shape: str = "ErrorAnswer",
) -> dict[str, Any]:
    request, answer, chunk = names
    ok = json_of(answer, "The answer, or its stream.")
    ok["content"][media_type] = {"schema": event_of(chunk) if media_type == "text/event-stream" else ref(chunk)}
    errors = tuple(status for status in ERRORS if status != "409" or request == "ResponsesRequest")
    made = operation(
        "generate",
        name,
        summary,
        ok,
        errors,
        description=note,
        parameters=[_header(), _timeout_header()],
        shape=shape,
    )
    return {**made, "requestBody": body_of(request, example)}


def unstreamed() -> tuple[str, ...]:
    """Errors of requests to the engine that answer whole."""
    return tuple(status for status in ERRORS if status != "409")
