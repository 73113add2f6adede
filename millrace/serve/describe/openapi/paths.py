"""All paths of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from millrace.serve.anthropic import routes as anthropic
from millrace.serve.describe.openapi.generation_paths import anthropic_paths, encode_paths, ollama_paths, openai_paths
from millrace.serve.describe.openapi.kept_paths import (
    batch_paths,
    cache_paths,
    conversation_paths,
    export_paths,
    file_paths,
    response_paths,
    session_paths,
    stored_chat_paths,
)
from millrace.serve.describe.openapi.operations import (
    ERRORS,
    json_of,
)
from millrace.serve.describe.openapi.server_paths import adapter_paths, operate_paths, own_paths
from millrace.serve.ollama import routes as ollama
from millrace.serve.tenancy.access import OPEN_PATHS
from millrace.web.pages import is_open as is_page


def paths() -> dict[str, Any]:
    found = _all_paths()
    for path, methods in found.items():
        if path not in OPEN_PATHS and not is_page(path):
            for operation in methods.values():
                operation["responses"].setdefault("401", json_of(_error_shape(path), ERRORS["401"]))
    return found


def _error_shape(path: str) -> str:
    if path.startswith(anthropic.PATHS):
        return "AnthropicErrorAnswer"
    return "OllamaErrorAnswer" if path.startswith(ollama.PATHS) else "ErrorAnswer"


def _all_paths() -> dict[str, Any]:
    return {
        **openai_paths(),
        **encode_paths(),
        **response_paths(),
        **conversation_paths(),
        **stored_chat_paths(),
        **cache_paths(),
        **session_paths(),
        **adapter_paths(),
        **export_paths(),
        **file_paths(),
        **batch_paths(),
        **anthropic_paths(),
        **ollama_paths(),
        **own_paths(),
        **operate_paths(),
    }
