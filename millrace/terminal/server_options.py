"""Commands that ask a running server: their options (which server, which key, which model) and its JSON answer."""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, BinaryIO

from millrace.config import client_api_key
from millrace.errors import MillraceError
from millrace.terminal.parser import UsageError
from millrace.terminal.running_servers import running_servers

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
LONG_TIMEOUT_S = 600.0
COPY_BYTES = 1 << 20


def add_server(parser: argparse.ArgumentParser, *, with_model: bool = True) -> None:
    text = f"server (default: the one that runs on this machine, else {DEFAULT_URL})"
    parser.add_argument("--url", metavar="URL", help=text)
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key (default: MILLRACE_API_KEY)")
    if with_model:
        parser.add_argument("--model", default="", metavar="NAME", help="which model (default: the server's first)")


def ask_server(args: argparse.Namespace, path: str, **query: object) -> Any:
    """The server's JSON answer. A model that the command line names is part of the query."""
    if vars(args).get("model"):
        query["model"] = args.model
    asked = urllib.parse.urlencode({name: value for name, value in query.items() if value is not None})
    return get_json(server_url(args), f"{path}?{asked}" if asked else path, args.api_key or client_api_key())


def server_url(args: argparse.Namespace) -> str:
    if args.url:
        return str(args.url)
    here = {server.url: server.model for server in running_servers()}
    if DEFAULT_URL in here or not here:
        return DEFAULT_URL
    if len(here) > 1:
        listed = ", ".join(f"{url} ({model})" for url, model in here.items())
        raise UsageError(f"Several servers run on this machine: {listed}. Choose one with --url.")
    return next(iter(here))


def send_to_server(args: argparse.Namespace, method: str, path: str, body: object = None) -> Any:
    """The server's JSON answer to a request that changes something, and may take long."""
    return get_json(server_url(args), path, args.api_key or client_api_key(), method, body, timeout_s=LONG_TIMEOUT_S)


def download(args: argparse.Namespace, path: str, target: Path) -> int:
    """Write the answer to a file; returns its size. Nothing is left of one that ended early."""
    partial = target.with_name(f".{target.name}.part")
    try:
        with _answer(args, "GET", path) as answer, partial.open("wb") as file:
            shutil.copyfileobj(answer, file, COPY_BYTES)
        partial.replace(target)
        return target.stat().st_size
    except (OSError, http.client.HTTPException) as error:
        raise MillraceError(f"{target} could not be written: {error}. Try again.") from error
    finally:
        partial.unlink(missing_ok=True)


def upload(args: argparse.Namespace, path: str, source: Path) -> Any:
    """Send a file as the body; returns the JSON answer, or None."""
    try:
        with source.open("rb") as file, _answer(args, "POST", path, file, source.stat().st_size) as answer:
            return json.loads(answer.read() or b"null")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MillraceError(f"{source} could not be sent: {error}.") from error


def _answer(args: argparse.Namespace, method: str, path: str, body: BinaryIO | None = None, size: int = 0) -> Any:
    url, key = server_url(args), args.api_key or client_api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers, data=body, method=method)
    try:
        return urllib.request.urlopen(request, timeout=LONG_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise MillraceError(f"{url} answered HTTP {error.code} to {path}: {_message(error.read())}") from error
    except urllib.error.URLError as error:
        raise MillraceError(f"{url} is not reachable ({error}). Is the server running? Use --url.") from error


def get_json(
    url: str, path: str, api_key: str = "", method: str = "GET", body: object = None, timeout_s: float = TIMEOUT_S
) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    data = None if body is None else json.dumps(body).encode()
    headers |= {} if data is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers, data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise MillraceError(f"{url} answered HTTP {error.code} to {path}: {_message(error.read())}") from error
    except (OSError, ValueError) as error:
        raise MillraceError(f"{url} is not reachable ({error}). Is the server running? Use --url.") from error


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
