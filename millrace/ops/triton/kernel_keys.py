"""Makes the cache keys of kernels independent of what was compiled before."""

from __future__ import annotations

from typing import Any

import triton


def settle_keys(names: dict[str, Any]) -> None:
    """Compute the cache keys of a module's kernels in the order of their definition, helpers first.

    A kernel's key in the cache on disk covers the module constants it uses; Triton 3.6 adds a helper's constants only
    if the helper's own key was computed before. This way every process finds the same keys."""
    for found in list(names.values()):
        if isinstance(found, triton.JITFunction):
            hash(found)
