"""Makes Triton's interpreter several times faster for kernels with helper functions.

The interpreter replaces the language's functions by its own once per launch, and again at every call of a helper,
although they stay replaced. Here the latter happens once per launch and module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def quick_interpreter() -> Iterator[None]:
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[str] = set()

    class Replaced:
        def restore(self) -> None:
            pass

    def replace_once(fn):
        if fn.__module__ in seen:
            return Replaced()
        seen.add(fn.__module__)
        return replace(fn)

    def launch_afresh(self, *args, **kwargs):
        seen.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            seen.clear()

    with (
        patch.object(interpreter, "_patch_lang", replace_once),
        patch.object(interpreter.GridExecutor, "__call__", launch_afresh),
    ):
        yield
