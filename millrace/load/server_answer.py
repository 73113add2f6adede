"""Asks a running server for JSON, with errors that say what to do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from millrace.errors import MillraceError

TIMEOUT_S = 30.0


def get_json(url: str, path: str, api_key: str = "") -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise MillraceError(f"{url} answered HTTP {error.code} to {path}: {_message(error.read())}") from error
    except (OSError, ValueError) as error:
        raise MillraceError(f"{url} is not reachable ({error}). Is the server running? Use --url.") from error


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
