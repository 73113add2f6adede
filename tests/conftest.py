"""What every test shares: quiet threads, reproducible property tests, and a clear reason where a GPU is missing."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported anywhere: two test workers on two cores must not spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples in every `make test`, so that a green tree stays green; `make fuzz` draws fresh ones.
settings.register_profile(
    "millrace",
    deadline=None,
    derandomize="MILLRACE_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("millrace")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Tests of Triton kernels run on the GPU where there is one: `-m gpu` means those too.
        if getattr(getattr(item, "module", None), "interpreted", None) is False:
            item.add_marker("gpu")
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
