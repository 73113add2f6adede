"""Sends one streamed request and times its events. Works with any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from millrace.load.records import Record

MAX_ERROR_CHARS = 160
_DATA = b"data:"
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    model: str
    api_key: str = ""
    ignore_eos: bool = True
    """Asks for exactly the wanted number of tokens. A server that refuses the field is asked without it."""
    temperature: float = 0.0
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def request_body(
    endpoint: Endpoint, messages: list[dict[str, str]], max_tokens: int, *, model: str, schema: Any, priority: str
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model or endpoint.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": endpoint.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    elif endpoint.ignore_eos:
        body["ignore_eos"] = True
    if priority:
        body["priority"] = priority
    return body


async def send(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    body: dict[str, Any],
    record: Record,
    start: float,
    on_event: Callable[[], None] | None = None,
) -> str:
    """Fills in the record; returns the text. `start`: of the run, on `time.monotonic`."""
    intended = start + record.intended_s
    record.sent_s = time.monotonic() - start
    text: list[str] = []
    try:
        async with session.post(f"{endpoint.url}/v1/chat/completions", json=body, headers=endpoint.headers) as answer:
            record.status = answer.status
            if answer.status != 200:
                record.error = f"HTTP {answer.status}: {_message(await answer.read())}"
            else:
                await _read(answer, record, intended, text, on_event)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS].rstrip(": ")
    except asyncio.CancelledError:
        record.error = "cancelled at the end of the run"
        raise
    finally:
        record.e2e_s = record.e2e_s or time.monotonic() - intended
    return "".join(text)


async def _read(
    answer: aiohttp.ClientResponse,
    record: Record,
    intended: float,
    text: list[str],
    on_event: Callable[[], None] | None,
) -> None:
    rest, last, num_texts = b"", 0.0, 0
    async for data in answer.content.iter_any():
        now = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA) or line.startswith(b"data: [DONE]"):
                continue
            delta = _note_event(line[len(_DATA) :], record)
            if record.error:
                return
            if not delta:
                continue
            text.append(delta)
            num_texts += 1
            if last:
                record.gaps_s.append(now - last)
            else:
                record.ttft_s = now - intended
            last = now
            if on_event is not None:
                on_event()
    record.e2e_s = time.monotonic() - intended
    if not num_texts:
        record.ttft_s = record.e2e_s
    record.output_tokens = record.output_tokens or num_texts


def _note_event(data: bytes, record: Record) -> str:
    """The text of an event. Usage and errors go into the record."""
    try:
        event = _decode(data)
    except msgspec.DecodeError:
        record.error = f"event is not JSON: {data[:80]!r}"
        return ""
    if not isinstance(event, dict):
        return ""
    if event.get("error"):
        record.error = f"stream: {event['error']}"[:MAX_ERROR_CHARS]
        return ""
    if isinstance(usage := event.get("usage"), dict):
        _note_usage(usage, record)
    found = ""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        found += delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return found


def _note_usage(usage: dict[str, Any], record: Record) -> None:
    record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    record.output_tokens = int(usage.get("completion_tokens") or 0)
    prompt, output = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    record.cached_tokens = int((prompt or {}).get("cached_tokens") or 0)
    record.reasoning_tokens = int((output or {}).get("reasoning_tokens") or 0)


def _message(body: bytes) -> str:
    try:
        error = _decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:MAX_ERROR_CHARS]
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:MAX_ERROR_CHARS].decode("utf-8", "replace")


async def probe(endpoint: Endpoint) -> Endpoint:
    """The endpoint with its model's name and without fields that the server refuses."""
    from dataclasses import replace

    from millrace.errors import ConfigError

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            async with session.get(f"{endpoint.url}/v1/models", headers=endpoint.headers) as answer:
                if answer.status in (401, 403):
                    raise ConfigError(f"{endpoint.url} requires an API key (HTTP {answer.status}). Use --api-key.")
                names = [str(entry["id"]) for entry in _decode(await answer.read())["data"]]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(f"{endpoint.url} is not reachable ({error}). Is the server running?") from error
        except (msgspec.DecodeError, KeyError, TypeError):
            names = []
        if not endpoint.model:
            if not names:
                raise ConfigError(f"{endpoint.url} lists no models. Choose one with --model.")
            endpoint = replace(endpoint, model=names[0])
        for ignore_eos in (True, False):
            endpoint = replace(endpoint, ignore_eos=ignore_eos)
            record = Record(0, 0, 0.0)
            messages = [{"role": "user", "content": "Hello"}]
            body = request_body(endpoint, messages, 2, model="", schema=None, priority="")
            await send(session, endpoint, body, record, time.monotonic())
            if not record.error:
                return endpoint
            if record.status not in (400, 422):
                break
    raise ConfigError(f"{endpoint.url} refuses a plain streamed chat request: {record.error}")
