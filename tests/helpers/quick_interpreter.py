"""Makes Triton's interpreter several times faster.

It replaces the language's functions by its own once per launch, and again at every call of a helper, although they stay
replaced: here the latter happens once per launch and module. It computes whether a sum or product of integers overflows
and drops the answer, which only debug mode would look at: here it does not. It makes the same types and shapes anew
for each value: here values share them. It compares shapes size by size, each wrapped in an object, where NumPy's arrays
know theirs, and looks through all modules of the language at each launch for what it replaces: here once.
"""

from __future__ import annotations

import dataclasses
import inspect
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
        _compare_shapes_of_arrays(stack)
        _remember_promotions(stack)
        _remember_members(stack)
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


def _compare_shapes_of_arrays(stack: ExitStack) -> None:
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self, lhs, rhs):
        left, right = lhs.handle.data.shape, rhs.handle.data.shape
        are_blocks = lhs.type.is_block() + rhs.type.is_block()
        if are_blocks == 1 or len(left) != len(right):
            return broadcast(self, lhs, rhs)
        if left == right:
            return lhs, rhs
        if not all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True)):
            return broadcast(self, lhs, rhs)  # It says what is wrong.
        shape = [max(a, b) for a, b in zip(left, right, strict=True)]

        def wide(value):
            if list(value.handle.data.shape) == shape:
                return value
            handle = self.builder.create_broadcast(value.handle, shape)
            return self.make_tensor(handle, core.block_type(value.type.scalar, shape))

        return wide(lhs), wide(rhs)

    stack.enter_context(patch.object(TritonSemantic, "broadcast_impl_value", broadcast_others))


def _remember_promotions(stack: ExitStack) -> None:
    from triton.language.semantic import TritonSemantic

    promote = TritonSemantic.computation_type_impl
    known: dict[tuple[Any, ...], Any] = {}

    def promote_once(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        found = known.get(key)
        if found is None:
            found = known[key] = promote(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return found

    stack.enter_context(patch.object(TritonSemantic, "computation_type_impl", promote_once))


def _remember_members(stack: ExitStack) -> None:
    from triton.language import core
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    known: dict[Any, list[tuple[str, Any]]] = {}

    def interpreted(member):
        # A builtin function of the language only checks that it was given what is given here.
        inner = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    def replace_members(place, builder, scope):
        if place not in known:
            members = inspect.getmembers(place)
            known[place] = [(name, interpreted(member)) for name, member in members if core.is_builtin(member)]
        for name, member in known[place]:
            scope.set_attr(place, name, member)

    stack.enter_context(patch.object(interpreter, "_patch_builtin", replace_members))


def _share_types(stack: ExitStack) -> None:
    from triton.language import core
    from triton.runtime import interpreter

    numpy_type_of = interpreter._get_np_dtype
    start_any_block, start_any_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_tensors: dict[int, tuple[Any, Any, Any]] = {}
    of_scalars = (core.tuple([]), core.constexpr(1))
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
        if not type.is_block():
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = of_scalars
        elif known := of_tensors.get(id(type.shape)):
            self.handle, self.type, self.dtype = handle, type, type.element_ty
            _, self.shape, self.numel = known
        else:
            start_any_tensor(self, handle, type)
            of_tensors[id(type.shape)] = (type.shape, self.shape, self.numel)

    def launch_afresh(self, *args, **kwargs):
        # The types of a launch's pointers are its own.
        blocks.clear()
        of_tensors.clear()
        return launch(self, *args, **kwargs)

    stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", launch_afresh))
    stack.enter_context(patch.object(interpreter, "_get_np_dtype", numpy_type))
    stack.enter_context(patch.object(core.block_type, "__init__", start_block))
    stack.enter_context(patch.object(core.tensor, "__init__", start_tensor))
