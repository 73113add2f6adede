"""Answers from any OpenAI-compatible server, over HTTP with the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from millrace.errors import EngineUnavailable, MillraceError
from millrace.terminal.sampling_options import AnswerStats, SamplingFields

_TIMEOUT_S = 600.0


class RemoteError(MillraceError):
    """The server returned an error."""


class RemoteBackend:
    """`stream_chat` and `stream_text` yield text as it arrives; closing the generator early disconnects."""

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RemoteError(f"'{url}' is not a server URL. Example: http://127.0.0.1:8000")
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.last = AnswerStats()
        self._stream_options = {"include_usage": True}
        self.model_name = self._choose(model)

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], fields: SamplingFields) -> Generator[str]:
        yield from self._stream("/v1/chat/completions", {"messages": list(messages), **fields})

    def stream_text(self, prompt: str, fields: SamplingFields) -> Generator[str]:
        yield from self._stream("/v1/completions", {"prompt": prompt, **fields})

    def takes_images(self) -> bool:
        try:
            connection, response = self._request("POST", "/api/show", {"model": self.model_name})
        except MillraceError:
            return True  # A server without this endpoint: it answers the message, or says what is wrong.
        try:
            capabilities = json.loads(response.read()).get("capabilities")
        except (ValueError, AttributeError):
            return True
        finally:
            connection.close()
        return not isinstance(capabilities, list) or "vision" in capabilities

    def close(self) -> None:
        pass

    def _choose(self, model: str) -> str:
        """The server's first model, or this one if the server knows it: by a name in its list, or by an alias."""
        try:
            entries = self._get("/v1/models")["data"]
            names = [str(entry["id"]) for entry in entries]
        except (KeyError, TypeError, RemoteError) as error:
            if model:
                return model
            if isinstance(error, RemoteError):
                raise
            raise RemoteError(f"{self._address()} did not return a list of models. Name one as MODEL.") from error
        if any(entry.get("owned_by") == "millrace" for entry in entries):
            # An answer that is stopped then has its counts too. Other servers may refuse what they do not know.
            self._stream_options["continuous_usage_stats"] = True
        if not names:
            raise RemoteError(f"{self._address()} lists no models.")
        if model and model not in names:
            try:
                self._get(f"/v1/models/{quote(model)}")
            except RemoteError as error:
                raise RemoteError(f"{self._address()} has no model '{model}'. It has: {', '.join(names)}.") from error
        return model or names[0]

    def _get(self, path: str) -> Any:
        connection, response = self._request("GET", path, None)
        try:
            return json.loads(response.read())
        except ValueError:
            return None
        finally:
            connection.close()

    def _stream(self, path: str, fields: dict[str, object]) -> Generator[str]:
        body = {"model": self.model_name, "stream": True, "stream_options": self._stream_options, **fields}
        self.last = AnswerStats()
        started = time.monotonic()
        connection, response = self._request("POST", path, body)
        first_s, pieces, reason = 0.0, 0, ""
        usage: dict[str, Any] = {}
        try:
            for event in _events(response):
                if event.get("error"):
                    raise RemoteError(_message_of(event) or str(event["error"]))
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                    if text:
                        first_s = first_s or time.monotonic() - started
                        pieces += 1
                        yield text
        except (http.client.HTTPException, OSError) as error:
            raise RemoteError(f"Lost the connection to {self._address()} ({type(error).__name__} {error}).") from error
        finally:
            connection.close()
            self.last = AnswerStats(
                prompt_tokens=usage.get("prompt_tokens"),
                cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
                output_tokens=usage.get("completion_tokens", pieces),
                first_token_s=first_s,
                total_s=time.monotonic() - started,
                finish_reason=reason or "interruption",
            )

    def _request(
        self, method: str, path: str, body: object
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._base + path, body=data, headers=self._headers)
            response = connection.getresponse()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise EngineUnavailable(f"Cannot connect to {self._address()} ({error}). Is the server running?") from error
        if response.status != 200:
            text = response.read().decode(errors="replace")
            connection.close()
            hint = " Set the key with --api-key." if response.status in (401, 403) else ""
            raise RemoteError(f"{self._address()} returned {response.status}: {_error_text(text)}{hint}")
        return connection, response

    def _address(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def _error_text(text: str) -> str:
    """The message in an error body, or the start of the body."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:300].strip() or "(empty body)"
    return (_message_of(body) if isinstance(body, dict) else "") or text[:300]


def _message_of(body: dict[str, Any]) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
