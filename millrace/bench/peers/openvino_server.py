"""Serves OpenVINO GenAI, which has no server, with the part of the OpenAI API that the benchmark uses.

Run by the interpreter that has openvino_genai installed: `python openvino_server.py MODEL --port 8003`. It needs only
the standard library and does as little per token as possible, so that OpenVINO's continuous batching is measured: one
thread calls `step`, the event loop writes the output. Each event holds one token decoded alone, so a character that
spans tokens appears as replacement characters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

_MAX_HEAD = 64 * 1024
_REQUEST_TIMEOUT_S = 60.0
_OK = "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n"
_STREAM = b"Transfer-Encoding: chunked\r\nCache-Control: no-store\r\n\r\n"


@dataclass(slots=True)
class BenchRequest:
    """One request, passed from the event loop to the stepping thread."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    score_prompt: bool
    arrived: asyncio.Queue[tuple[list[int], list[float], bool]] = field(default_factory=asyncio.Queue)
    """New tokens, their log-probabilities, and whether these are the last."""
    handle: Any = None
    abandoned: bool = False


class Engine:
    """The pipeline and the thread that steps it; the thread blocks while idle."""

    def __init__(self, args: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]  # of the interpreter that runs this

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = args.cache_gib
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = args.batched_tokens
        properties = {"INFERENCE_NUM_THREADS": args.threads} if args.threads else {}
        self._pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._genai = genai
        self._loop = loop
        self._numbers = itertools.count(1)
        self._new: list[BenchRequest] = []
        self._wake = threading.Condition()
        self.events = self._make_events()
        threading.Thread(target=self._run_or_end, daemon=True).start()

    def submit(self, request: BenchRequest) -> None:
        with self._wake:
            self._new.append(request)
            self._wake.notify()

    def _make_events(self) -> list[bytes]:
        """The SSE event of each token, made once."""
        size = max(self.tokenizer.get_vocab().values()) + 1
        texts = self.tokenizer.decode([[index] for index in range(size)], skip_special_tokens=False)
        return [_event({"choices": [{"index": 0, "text": text or " "}]}) for text in texts]

    def _run_or_end(self) -> None:
        """End the process if the stepping thread fails; else its clients would wait forever."""
        try:
            self._run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _run(self) -> None:
        active: list[BenchRequest] = []
        while True:
            with self._wake:
                while not self._new and not active:
                    self._wake.wait()
                fresh, self._new = self._new, []
            for request in fresh:
                self._admit(request)
            active += fresh
            self._pipeline.step()
            arrived = [(request, *_read(request.handle)) for request in active]
            self._loop.call_soon_threadsafe(_deliver, arrived)
            active = [request for request, _, _, ended in arrived if not ended]

    def _admit(self, request: BenchRequest) -> None:
        import numpy as np
        from openvino import Tensor  # type: ignore[import-not-found]

        config = self._genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = request.ignore_eos
        config.do_sample = False
        if request.score_prompt:
            config.echo, config.logprobs = True, 1
        ids = Tensor(np.array([request.prompt], dtype=np.int64))
        request.handle = self._pipeline.add_request(next(self._numbers), ids, config)


def _read(handle: Any) -> tuple[list[int], list[float], bool]:
    tokens: list[int] = []
    logprobs: list[float] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
            logprobs += output.generated_log_probs
    return tokens, logprobs, handle.get_status().name != "RUNNING"


def _deliver(arrived: list[tuple[BenchRequest, list[int], list[float], bool]]) -> None:
    for request, tokens, logprobs, ended in arrived:
        if request.abandoned and not ended:
            request.handle.cancel()
        elif tokens or ended:
            request.arrived.put_nowait((tokens, logprobs, ended))


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode(errors="replace") + b"\n\n"


class BadRequest(Exception):
    """The request is invalid; the message goes to the client."""


class Server:
    """The part of HTTP/1.1 that the benchmark's client needs."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            while not reader.at_eof():
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                length = _content_length(head)
                body = await asyncio.wait_for(reader.readexactly(length), _REQUEST_TIMEOUT_S)
                await self._answer(method.decode(), path.decode(), body, writer)
        writer.close()

    async def _answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            if (method, path) == ("GET", "/health"):
                _send(writer, 200, {"status": "ok"})
            elif (method, path) == ("GET", "/v1/models"):
                _send(writer, 200, {"object": "list", "data": [{"id": self._model, "object": "model"}]})
            elif (method, path) == ("POST", "/tokenize"):
                _send(writer, 200, {"tokens": self._tokenize(json.loads(body))})
            elif (method, path) == ("POST", "/v1/completions"):
                await self._complete(json.loads(body), writer)
            else:
                _send(writer, 404, {"error": {"message": f"there is no {method} {path}"}})
        except (BadRequest, ValueError, KeyError, TypeError) as error:
            _send(writer, 400, {"error": {"message": f"{type(error).__name__}: {error}"}})
        await writer.drain()

    def _tokenize(self, body: dict[str, Any]) -> list[int]:
        text, special = body["prompt"], bool(body.get("add_special_tokens", True))
        encoded = self._engine.tokenizer.encode(text, add_special_tokens=special)
        return [int(token) for token in encoded.input_ids.data[0]]

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = body["prompt"]
        ids = self._tokenize({"prompt": prompt}) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise BadRequest("the prompt has no tokens")
        stream, score = bool(body.get("stream")), body.get("prompt_logprobs") is not None
        if stream and score:
            raise BadRequest("prompt_logprobs is not available with stream")
        request = BenchRequest(ids, int(body.get("max_tokens") or 16), bool(body.get("ignore_eos")), score)
        self._engine.submit(request)
        try:
            await (self._stream(request, writer) if stream else self._whole(request, writer))
        finally:
            request.abandoned = True

    async def _stream(self, request: BenchRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(_OK.format(kind="text/event-stream").encode() + _STREAM)
        count, ended = 0, False
        while not ended:
            tokens, _, ended = await request.arrived.get()
            for token in tokens:
                _chunk(writer, self._engine.events[token])
            count += len(tokens)
            if writer.is_closing():
                return
        _chunk(writer, _event({"choices": [], "usage": _usage(request, count)}) + b"data: [DONE]\n\n")
        _chunk(writer, b"")

    async def _whole(self, request: BenchRequest, writer: asyncio.StreamWriter) -> None:
        tokens: list[int] = []
        logprobs: list[float] = []
        ended = False
        while not ended:
            more, scores, ended = await request.arrived.get()
            tokens, logprobs = tokens + more, logprobs + scores
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if request.score_prompt:
            # The echoed prompt precedes the output; the score of its first token is meaningless.
            scored = list(zip(request.prompt, logprobs, strict=False))[1:]
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": score}} for token, score in scored)]
            tokens = tokens[len(request.prompt) :]
        choice["text"] = self._engine.tokenizer.decode(tokens)
        _send(writer, 200, {"choices": [choice], "usage": _usage(request, len(tokens))})


def _usage(request: BenchRequest, count: int) -> dict[str, int]:
    prompt = len(request.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def _send(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    words = {200: "OK", 400: "Bad Request", 404: "Not Found"}
    head = f"HTTP/1.1 {status} {words[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(args: argparse.Namespace) -> None:
    engine = Engine(args, asyncio.get_running_loop())
    server = await asyncio.start_server(Server(engine, "openvino").handle, args.host, args.port, limit=_MAX_HEAD)
    print(f"OpenVINO GenAI on http://{args.host}:{args.port}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a directory in OpenVINO's format")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8003)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = OpenVINO's default")
    parser.add_argument("--cache-gib", type=int, default=2, help="size of the KV cache in GiB")
    parser.add_argument("--batched-tokens", type=int, default=512, help="maximum tokens per step")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
