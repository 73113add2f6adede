"""How long answers should be, which some chat templates tell the model."""

from __future__ import annotations

from typing import Literal

from millrace.errors import BadRequest
from millrace.serve.state import FrontState

Verbosity = Literal["low", "medium", "high"]
VARIABLE = "verbosity"


def verbosity_kwargs(state: FrontState, wanted: Verbosity | None, field: str) -> dict[str, str]:
    """Variables for the template. `medium` is what every model does anyway."""
    if wanted is None:
        return {}
    if VARIABLE in state.template.variables:
        return {VARIABLE: wanted}
    if wanted == "medium":
        return {}
    raise BadRequest(
        f"'{field}' is {wanted!r}, but this model's chat template does not read it; say in the prompt how long the"
        " answer should be.",
        param=field,
        code="unsupported_parameter",
    )
