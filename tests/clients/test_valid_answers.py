"""Answers over several schemas, validated by an independent package. In full: `tools/check_schemas.py`."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

URL = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
TEXT = {"type": "string", "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}}},
    {"type": "array", "items": {"enum": ["red", "green", None]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {"anyOf": [{"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}, {"type": "number", "multipleOf": 0.5}]},
    {
        "$defs": {"node": {"type": "object", "properties": {"tag": TEXT, "next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}, "required": ["at"]},
]


def test_answers_conform(model: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", timeout=300)

    def ask(number: int) -> str:
        schema = SCHEMAS[number % len(SCHEMAS)]
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        messages: Any = [{"role": "user", "content": "Invent a short example."}]
        answer = client.chat.completions.create(
            model=model, messages=messages, response_format=wanted, max_tokens=100, seed=number, temperature=0.8
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
        return str(choice.finish_reason)

    with ThreadPoolExecutor(8) as threads:
        reasons = list(threads.map(ask, range(3 * len(SCHEMAS))))
    assert set(reasons) <= {"stop", "length"}
    assert reasons.count("stop") > len(SCHEMAS)
