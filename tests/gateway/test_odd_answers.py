"""Answers that no server of ours gives, and that HTTP allows: they reach clients unharmed, or cost no more than one
request."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.gateways import GatewayUnderTest, gateway_over

from millrace.errors import ConfigError
from millrace.gateway.replica_http.client import ReplicaClient, tls_trusting
from millrace.gateway.settings import ReplicaSettings

pytestmark = pytest.mark.live
EVENT = b'data: {"id":"a","choices":[{"index":0,"text":"h\xc3\xa9"}]}\n\ndata: [DONE]\n\n'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def chunks(body: bytes, size: int) -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


@asynccontextmanager
async def over_odd(
    answer: bytes,
    prefix: str = "",
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    *,
    by_byte: bool = False,
    **settings: Any,
) -> AsyncIterator[GatewayUnderTest]:
    """A gateway over a replica that gives this answer to all but probes. Its connections end with their answer: first
    the side that the replica writes. `by_byte`: every byte is sent by itself."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        is_probe = path in (f"{prefix}/ready", f"{prefix}/v1/load", f"{prefix}/v1/models")
        fine = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        if by_byte and not is_probe:
            for at in range(len(answer)):
                writer.write(answer[at : at + 1])
                await asyncio.sleep(0.001)
        else:
            writer.write(fine if is_probe else answer)
        if writer.can_write_eof():
            writer.write_eof()
        await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    try:
        scheme = "http" if tls is None else "https"
        async with gateway_over(
            ReplicaSettings(f"{scheme}://{shown}:{port}{prefix}", name="odd"), **settings
        ) as gateway:
            yield gateway
    finally:
        server.close()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_may_end_anywhere(size: int) -> None:
    async def check() -> None:
        async with over_odd(STREAM + CHUNKED + chunks(EVENT, size) + b"0\r\nX-Trailer: t\r\n\r\n") as gateway:
            seen = await gateway.stream("x")
            assert (seen.status, seen.text, seen.is_done, seen.errors) == (200, "hé", True, [])

    asyncio.run(check())


def test_informational_answers_come_before_the_answer() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"

    async def check() -> None:
        async with over_odd(hints + STREAM + CHUNKED + chunks(EVENT, 20) + b"0\r\n\r\n") as gateway:
            seen = await gateway.stream("x")
            assert (seen.status, seen.text, seen.is_done) == (200, "hé", True)
            assert "Link" not in seen.headers

    asyncio.run(check())


def test_headers_that_come_twice_or_are_not_ascii_reach_the_client() -> None:
    odd = b"X-Note: one\r\nX-Note: two\r\nX-Name: caf\xc3\xa9\r\nX-Raw: \xff\r\n"

    async def check() -> None:
        async with over_odd(STREAM + odd + CHUNKED + chunks(EVENT, 20) + b"0\r\n\r\n") as gateway:
            seen = await gateway.stream("x")
            assert (seen.status, seen.text) == (200, "hé")
            assert seen.headers.getall("X-Note") == ["one", "two"]
            assert seen.headers["X-Name"] == "café"
        whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + odd + b"Content-Length: 2\r\n\r\n{}"
        async with over_odd(whole) as gateway:
            for path in ("/v1/completions", "/tokenize"):
                async with gateway.session.post(gateway.url + path, json={}) as answer:
                    assert (answer.status, await answer.read()) == (200, b"{}"), path
                    assert answer.headers.getall("X-Note") == ["one", "two"]
                    assert answer.headers["X-Name"] == "café"

    asyncio.run(check())


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(status: int) -> None:
    async def check() -> None:
        async with over_odd(b"HTTP/1.1 %d Fine\r\nETag: x\r\n\r\n" % status) as gateway:
            async with gateway.session.get(gateway.url + "/v1/anything") as answer:
                assert (answer.status, await answer.read(), answer.headers["ETag"]) == (status, b"", "x")
            async with gateway.session.post(gateway.url + "/v1/completions", json={"stream": True}) as answer:
                assert (answer.status, await answer.read()) == (status, b"")

    asyncio.run(check())


def test_head_says_how_long_the_body_would_be() -> None:
    async def check() -> None:
        async with over_odd(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n") as gateway:
            async with gateway.session.head(gateway.url + "/v1/files/x/content") as answer:
                assert (answer.status, answer.headers["Content-Length"]) == (200, "1234")
            async with gateway.session.options(gateway.url + "/v1/files/x/content") as answer:
                assert answer.status in (200, 204, 503), "its body is missing"

    asyncio.run(check())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + CHUNKED + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 70_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX Bad: 1\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
def test_answers_that_lie_cost_an_error_and_nothing_else(answer: bytes) -> None:
    async def check() -> None:
        async with over_odd(answer) as gateway:
            for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
                status, said = await gateway.post("/v1/completions", body)
                assert status == 503, said
                assert said["error"]["code"] == "engine_unavailable"
            assert (await gateway.get("/health"))[0] == 200

    asyncio.run(check())


def test_a_compressed_stream_goes_on_as_a_whole() -> None:
    body = chunks(gzip.compress(EVENT), 10)

    async def check() -> None:
        async with over_odd(STREAM + b"Content-Encoding: gzip\r\n" + CHUNKED + body + b"0\r\n\r\n") as gateway:
            seen = await gateway.stream("x")
            assert (seen.status, seen.text, seen.is_done) == (200, "hé", True)

    asyncio.run(check())


@pytest.mark.parametrize(("prefix", "host"), [("/deep/under", "127.0.0.1"), ("", "::1")])
def test_replicas_below_a_path_and_by_ipv6(prefix: str, host: str) -> None:
    async def check() -> None:
        async with over_odd(STREAM + CHUNKED + chunks(EVENT, 9) + b"0\r\n\r\n", prefix, host) as gateway:
            assert (await gateway.stream("x")).text == "hé"

    asyncio.run(check())


@pytest.mark.parametrize(
    "answer",
    [
        STREAM + CHUNKED + chunks(EVENT, 9) + b"0\r\nX-Trailer: t\r\n\r\n",
        STREAM.replace(b"/1.1", b"/1.0") + b"\r\n" + EVENT,
        STREAM.replace(b"/1.1", b"/1.0") + b"Connection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(EVENT) + EVENT,
    ],
    ids=["chunked", "HTTP/1.0 to the end", "HTTP/1.0 by length"],
)
def test_answers_come_byte_by_byte_and_from_http_1_0(answer: bytes) -> None:
    async def check() -> None:
        async with over_odd(answer, by_byte=True) as gateway:
            seen = await gateway.stream("x")
            assert (seen.status, seen.text, seen.is_done, seen.errors) == (200, "hé", True, [])

    asyncio.run(check())


def test_replicas_on_https_need_a_certificate_that_the_gateway_trusts(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=miller", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    answer = STREAM + CHUNKED + chunks(EVENT, 9) + b"0\r\n\r\n"

    async def check() -> None:
        async with over_odd(answer, tls=tls, replica_ca=str(cert)) as gateway:
            seen = await gateway.stream("x")
            assert (seen.status, seen.text, seen.is_done) == (200, "hé", True)
            url = gateway.state.fleet.replicas["odd"].settings.url
            for context, host in ((None, url), (tls_trusting(str(cert)), url.replace("127.0.0.1", "localhost"))):
                client = ReplicaClient(30.0, asyncio.get_running_loop().time, context)
                with pytest.raises(ssl.SSLCertVerificationError):
                    await client.request("GET", host, "/v1/models", {}, b"")
                client.close()

    asyncio.run(check())
    with pytest.raises(ConfigError, match="replica_ca"):
        tls_trusting(str(key))
    with pytest.raises(ConfigError, match="replica_ca"):
        tls_trusting(str(tmp_path / "none.pem"))
