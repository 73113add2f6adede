"""Options of commands that ask a running server: which server, which key, which model."""

from __future__ import annotations

import argparse
import urllib.parse
from typing import Any

from millrace.config import client_api_key
from millrace.terminal.parser import UsageError
from millrace.terminal.running_servers import running_servers

DEFAULT_URL = "http://127.0.0.1:8000"


def add_server(parser: argparse.ArgumentParser, *, with_model: bool = True) -> None:
    text = f"server (default: the one that runs on this machine, else {DEFAULT_URL})"
    parser.add_argument("--url", metavar="URL", help=text)
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key (default: MILLRACE_API_KEY)")
    if with_model:
        parser.add_argument("--model", default="", metavar="NAME", help="which model (default: the server's first)")


def ask_server(args: argparse.Namespace, path: str, **query: object) -> Any:
    """The server's JSON answer. A model that the command line names is part of the query."""
    from millrace.load.server_answer import get_json

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
