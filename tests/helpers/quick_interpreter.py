"""Makes Triton's interpreter several times faster.

It replaces the language's functions by its own once per launch, and again at every call of a helper, although they stay
replaced: here the latter happens once per launch and module. It computes whether a sum or product of integers overflows
and drops the answer, which only debug mode would look at: here it does not. And it makes the same types and shapes anew
for each value: here values share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_interpreter() -> Iterator[None]:
    from triton.runtime import interpreter

    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with ExitStack() as stack:
        stack.enter_context(patch.object(interpreter.interpreter_builder, "options", options))
        _share_types(stack)
        _replace_once_a_launch(stack)
        yield


def _replace_once_a_launch(stack: ExitStack) -> None:
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

    stack.enter_context(patch.object(interpreter, "_patch_lang", replace_once))
    stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", launch_afresh))


def _share_types(stack: ExitStack) -> None:
    from triton.language import core
    from triton.runtime import interpreter

    numpy_type_of = interpreter._get_np_dtype
    start_any_block, start_any_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_tensors: dict[int, tuple[Any, Any, Any]] = {}
    launch = interpreter.GridExecutor.__call__

    def numpy_type(type_of_language):
        name = type_of_language.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type_of(type_of_language)
        return numpy_types[name]

    def start_block(self, element_ty, shape):
        key = (id(element_ty), *[size.value if isinstance(size, core.constexpr) else size for size in shape])
        known = blocks.get(key)
        if known is None:
            start_any_block(self, element_ty, shape)
            blocks[key] = vars(self)  # It holds the type of its elements, whose id stays taken.
        else:
            vars(self).update(known)

    def start_tensor(self, handle, type):
        known = of_tensors.get(id(type.shape)) if type.is_block() else None
        if known is None:
            start_any_tensor(self, handle, type)
            if type.is_block():
                of_tensors[id(type.shape)] = (type.shape, self.shape, self.numel)
        else:
            self.handle, self.type, self.dtype = handle, type, type.element_ty
            _, self.shape, self.numel = known

    def launch_afresh(self, *args, **kwargs):
        # The types of a launch's pointers are its own.
        blocks.clear()
        of_tensors.clear()
        return launch(self, *args, **kwargs)

    stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", launch_afresh))
    stack.enter_context(patch.object(interpreter, "_get_np_dtype", numpy_type))
    stack.enter_context(patch.object(core.block_type, "__init__", start_block))
    stack.enter_context(patch.object(core.tensor, "__init__", start_tensor))
