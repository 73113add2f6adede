"""What is kept of prompts to explain them goes when their tenant is forgotten."""

from __future__ import annotations

import numpy as np

from millrace.engine.ledger import Ledger
from millrace.link.messages import NewRequest, pack_tokens
from millrace.params.sampling import SamplingParams
from millrace.plan.divergence import Divergence
from millrace.plan.request import Request, end_of


def test_prompts_of_a_forgotten_tenant_are_not_kept_for_explanations() -> None:
    ledger, found = Ledger(), {}
    for number, (tenant, has_ended) in enumerate([("gone", True), ("gone", False), ("stays", True)]):
        request = Request(id=number, prompt=np.arange(8, dtype=np.int32), max_tokens=1, tenant=tenant)
        request.diagnostics.divergence = Divergence(request.prompt.tobytes(), 0, 4, [b"\1" * 16])
        params, name = SamplingParams(max_tokens=1), f"request-{number}"
        message = NewRequest(
            id=number, prompt=pack_tokens(range(8)), params=params, arrival=1.0, tenant=tenant, names=(name,)
        )
        ledger.open(message, request, 1.0)
        if has_ended:
            ledger.close(end_of(request, "stop", 1), 2.0)
        found[number] = ledger.named(name, tenant)[0].diagnostics
    ledger.forget_prompts("gone")
    assert [found[number].diverged is None for number in range(3)] == [True, True, False]
