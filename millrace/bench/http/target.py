"""A client of the measured server: probes which features it accepts, then times streamed completions."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from millrace.bench.errors import BenchError
from millrace.bench.http.prompts import IdPrompts, Prompt, PromptMaker, TextPrompts, sample_text

_SAMPLE_WORDS = 400
_REFUSED = (400, 422)
_END: dict[str, Any] = {}
"""Marks the end of a stream; compared by identity."""


@dataclass(slots=True)
class Sample:
    """One request as seen by its client. Times are seconds on the monotonic clock."""

    started_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended_at: float = 0.0
    chunks: int = 0
    """Events that carried text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class AcceptedFeatures:
    """Features found by probing. Each missing one has a fallback that the report names."""

    chat_only: bool = False
    ignore_eos: bool = True
    usage: bool = True
    token_ids: bool = False


@dataclass(slots=True)
class Target:
    """Use as `async with Target(url, model) as target`."""

    url: str
    model: str = ""
    api_key: str = ""
    request_timeout_s: float = 600.0
    accepts: AcceptedFeatures = field(default_factory=AcceptedFeatures)
    _session: aiohttp.ClientSession | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise BenchError(f"'{self.url}' is not a server URL. Example: http://127.0.0.1:8000")
        self.url = self.url.rstrip("/").removesuffix("/v1")

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # Some servers close idle ones untold.
            timeout=aiohttp.ClientTimeout(total=self.request_timeout_s),
            headers=headers,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use `async with`"
        return self._session

    async def probe(self, seed: int) -> PromptMaker:
        """Find the model name and the accepted features; returns a suitable prompt maker."""
        await self.find_model()
        await self._probe_features()
        ids = await self._tokenize(sample_text(_SAMPLE_WORDS, seed))
        if ids and not self.accepts.chat_only and not (await self._try(ids[:16]))[0]:
            self.accepts = replace(self.accepts, token_ids=True)
            return IdPrompts(seed, tuple(dict.fromkeys(ids)))
        return TextPrompts(seed, await self._tokens_per_word(ids, seed))

    async def find_model(self) -> None:
        """Use the only model that the server lists, unless a name was given."""
        if not self.model:
            self.model = await self._only_model()

    async def complete(
        self, prompt: Prompt, output_tokens: int, on_text: Callable[[float], None] | None = None
    ) -> Sample:
        """Time one streamed completion. A failure becomes a sample with `error`; it does not raise. `on_text` is called
        with the time of each event that carries text."""
        sample = Sample(started_at=time.monotonic())
        try:
            async with self.session.post(self._endpoint(), json=self._body(prompt, output_tokens)) as response:
                if response.status != 200:
                    sample.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                else:
                    await self._read_stream(response, sample, on_text)
        except TimeoutError:
            sample.error = f"not completed within {self.request_timeout_s:g} s"
        except aiohttp.ClientError as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.ended_at = time.monotonic()
        if not sample.error and not sample.chunks and not sample.output_tokens:
            sample.error = "the stream ended without a token"
        if not sample.output_tokens:
            sample.output_tokens = sample.chunks
        return sample

    async def _read_stream(
        self, response: aiohttp.ClientResponse, sample: Sample, on_text: Callable[[float], None] | None
    ) -> None:
        async for event in _events(response):
            if event.get("error"):
                sample.error = str(event["error"])[:300]
                return
            _note_usage(sample, event.get("usage"))
            if any(_text_of(choice) for choice in event.get("choices") or ()):
                now = time.monotonic()
                sample.first_token_at = sample.first_token_at or now
                sample.last_token_at = now
                sample.chunks += 1
                if on_text is not None:
                    on_text(now)

    def _endpoint(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.accepts.chat_only else 'completions'}"

    def _body(self, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        if self.accepts.chat_only:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.accepts.ignore_eos:
            body["ignore_eos"] = True
        if self.accepts.usage:
            body["stream_options"] = {"include_usage": True}
        return body

    async def _only_model(self) -> str:
        try:
            async with self.session.get(f"{self.url}/v1/models") as response:
                text = await response.text()
                if response.status in (401, 403):
                    raise BenchError(f"{self.url} requires an API key (HTTP {response.status}). Use --api-key.")
                names = [str(entry["id"]) for entry in json.loads(text)["data"]] if response.status == 200 else []
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self.url} is not reachable ({error}). Is the server running?") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{self.url}/v1/models did not return a list of models. Use --model.") from error
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none"
            raise BenchError(f"{self.url} lists {len(names)} models ({listed}). Choose one with --model.")
        return names[0]

    async def _probe_features(self) -> None:
        """Request all features, then drop one after another until the server accepts."""
        problem, missing = await self._try("Hello")
        if missing:
            self.accepts = replace(self.accepts, chat_only=True)
            problem, _ = await self._try("Hello")
        for change in ({"ignore_eos": False}, {"ignore_eos": True, "usage": False}, {"ignore_eos": False}):
            if not problem:
                return
            self.accepts = replace(self.accepts, **change)
            problem, _ = await self._try("Hello")
        if problem:
            raise BenchError(f"{self._endpoint()} refuses a plain streamed completion: {problem}")

    async def _try(self, prompt: Prompt) -> tuple[str, bool]:
        """Send a two-token request. Returns the error, if any, and whether the endpoint is missing."""
        try:
            async with self.session.post(self._endpoint(), json=self._body(prompt, 2)) as response:
                text = await response.text()
                if response.status in (401, 403):
                    raise BenchError(f"{self.url} requires an API key (HTTP {response.status}). Use --api-key.")
                if response.status == 200:
                    return "", False
                problem = f"HTTP {response.status}: {text[:300]}"
                if response.status not in (*_REFUSED, 404, 405, 500, 501):
                    raise BenchError(f"{self._endpoint()} returned {problem}")
                unknown_model = "model" in text.lower() and response.status == 404
                return problem, response.status in (404, 405, 501) and not unknown_model
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self.url} is not reachable ({error}). Is the server running?") from error

    async def _tokenize(self, text: str) -> list[int]:
        """Token ids from the server's /tokenize, in vLLM's or llama.cpp's form; empty if it has none."""
        for body in ({"model": self.model, "prompt": text, "add_special_tokens": False}, {"content": text}):
            try:
                async with self.session.post(f"{self.url}/tokenize", json=body) as response:
                    ids = json.loads(await response.text()).get("tokens") if response.status == 200 else None
                if isinstance(ids, list) and ids and all(isinstance(x, int) for x in ids):
                    return ids
            except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError):
                continue
        return []

    async def _tokens_per_word(self, ids: list[int], seed: int) -> float:
        if ids:
            return len(ids) / _SAMPLE_WORDS
        sample = await self.complete(sample_text(_SAMPLE_WORDS, seed), 1)
        return sample.prompt_tokens / _SAMPLE_WORDS if sample.prompt_tokens else 1.0


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream, until `[DONE]`. Comments and other fields are skipped.

    Reads chunks rather than lines, which is cheaper: the client shares the cores with the measured server.
    """
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            event = _parsed(line)
            if event is _END:
                return
            if event is not None:
                yield event
    event = _parsed(rest)
    if event is not None and event is not _END:
        yield event


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The event in a line, None if it has none, `_END` for `[DONE]`."""
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if data == b"[DONE]":
        return _END
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"error": f"event is not JSON: {data[:80]!r}"}
    return event if isinstance(event, dict) else {"error": f"event is not an object: {data[:80]!r}"}


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    text = (delta.get("content") or delta.get("reasoning_content")) if isinstance(delta, dict) else choice.get("text")
    return text or ""


def _note_usage(sample: Sample, usage: object) -> None:
    if isinstance(usage, dict):
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details")
        sample.cached_tokens = int(details.get("cached_tokens") or 0) if isinstance(details, dict) else 0
