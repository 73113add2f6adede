"""A struct with a tag stands in a union: alone, msgspec takes it without its tag, which the description requires."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import msgspec
from msgspec import inspect

import millrace.serve


def requests() -> Iterator[type[msgspec.Struct]]:
    for module in pkgutil.walk_packages(millrace.serve.__path__, "millrace.serve."):
        if "schemas" not in module.name:
            continue
        for name, found in vars(importlib.import_module(module.name)).items():
            if isinstance(found, type) and issubclass(found, msgspec.Struct) and name.endswith("Request"):
                yield found


def alone(kind: inspect.Type, at: str, seen: set[type], *, in_union: bool = False) -> Iterator[str]:
    """The fields whose only struct has a tag."""
    if isinstance(kind, inspect.UnionType):
        num_structs = sum(isinstance(one, inspect.StructType) for one in kind.types)
        for one in kind.types:
            yield from alone(one, at, seen, in_union=num_structs > 1)
    elif isinstance(kind, inspect.StructType):
        if kind.tag is not None and not in_union:
            yield at
        if kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                yield from alone(field.type, f"{kind.cls.__name__}.{field.encode_name}", seen)
    elif isinstance(kind, inspect.ListType):
        yield from alone(kind.item_type, at, seen)
    elif isinstance(kind, inspect.DictType):
        yield from alone(kind.value_type, at, seen)
    elif isinstance(kind, inspect.Metadata):
        yield from alone(kind.type, at, seen, in_union=in_union)


def test_no_tagged_struct_stands_alone() -> None:
    bodies, seen = list(requests()), set[type]()
    assert len(bodies) > 8
    found = [at for body in bodies for at in alone(inspect.type_info(body), body.__name__, seen)]
    assert found == []
    assert len(seen) > 60
