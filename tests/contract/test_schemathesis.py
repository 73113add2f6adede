"""Schemathesis on our own OpenAPI document: whatever it says may be sent is answered as it says, and what it says may
not be sent is refused.

`make fuzz SIZE=500` sends that many requests of both kinds to each operation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from serve.front_under_test import MODEL, VOCAB, Front, running_front, saying

from millrace.serve.describe.openapi import openapi_document

SIZE = int(os.environ.get("MILLRACE_FUZZ", "4"))
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "unsupported_method"),
)


def document() -> dict[str, Any]:
    """As served, and narrowed to the one model and the vocabulary that are: random names would all be a 404."""
    found: dict[str, Any] = json.loads(openapi_document())
    for name, schema in found["components"]["schemas"].items():
        fields = schema["properties"]
        if name.endswith("Request") and "model" in fields:
            fields["model"] = {"enum": [MODEL] if "model" in schema.get("required", ()) else [MODEL, None]}
        if name == "DetokenizeRequest":
            fields["tokens"]["items"] = {"type": "integer", "minimum": 0, "maximum": VOCAB - 1}
    return found


OPERATIONS = {(method, path): spec for path, methods in document()["paths"].items() for method, spec in methods.items()}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("fine"), max_context=256) as running:
        yield running
        assert running.call(lambda: len(running.engine.rows)) == 0


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(document())


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_operation(front: Front, schema: Any, method: str, path: str) -> None:
    from schemathesis import GenerationMode, checks

    operation, rules = schema[path][method.upper()], [getattr(checks, name) for name in CHECKS]
    spec = OPERATIONS[method, path]
    has_input = bool(spec.get("requestBody") or spec.get("parameters"))
    # Any text may stand in a path or a form; only JSON and queries can be wrong by their type.
    is_json = "application/json" in spec.get("requestBody", {}).get("content", {})
    can_be_wrong = is_json or any(one["in"] == "query" for one in spec.get("parameters", ()))
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if can_be_wrong else (GenerationMode.POSITIVE,)

    def check(case: Any) -> None:
        response = case.call(base_url=front.url, timeout=20)
        if response.status_code != 504:  # A tiny `timeout` is legal, and nobody can keep it.
            case.validate_response(response, checks=rules)

    for mode in modes:
        bounded = settings(
            max_examples=SIZE if has_input else 1,
            derandomize=SIZE < 100,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        bounded(given(case=operation.as_strategy(generation_mode=mode))(check))()
