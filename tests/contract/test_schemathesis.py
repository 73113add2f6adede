"""Schemathesis on our own OpenAPI document: whatever it says may be sent is answered as it says.

`MILLRACE_FUZZ=500 pytest tests/contract/test_schemathesis.py` sends about that many requests to each operation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks
from serve.front_under_test import MODEL, VOCAB, Front, running_front, saying

from millrace.serve.openapi import openapi_document

SIZE = int(os.environ.get("MILLRACE_FUZZ", "5"))
CHECKS: list[Any] = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


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


schema = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("fine"), max_context=256) as running:
        yield running
        assert running.call(lambda: len(running.engine.rows)) == 0


@schema.parametrize()
@settings(
    max_examples=SIZE,
    deadline=None,
    derandomize=SIZE < 100,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_operation(front: Front, case: schemathesis.Case) -> None:
    response = case.call(base_url=front.url, timeout=20)
    if response.status_code != 504:  # A tiny `timeout` is legal, and nobody can keep it.
        case.validate_response(response, checks=CHECKS)
