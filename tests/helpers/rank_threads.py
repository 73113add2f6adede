"""The ranks of a mesh as threads of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from millrace.run.ranks.shared_mesh import SharedMesh, make_links

T = TypeVar("T")


@contextmanager
def meshes_of(size: int) -> Iterator[list[SharedMesh]]:
    found = [SharedMesh(link) for link in make_links(size)]
    for mesh in found:
        mesh.beat()
    try:
        yield found
    finally:
        for mesh in found:
            mesh.close()


def on_all(meshes: list[SharedMesh], work: Callable[[SharedMesh], T]) -> list[T]:
    """What each rank returns. Raises the first exception, in the order of ranks."""
    with ThreadPoolExecutor(len(meshes)) as pool:
        return [each.result(60) for each in [pool.submit(work, mesh) for mesh in meshes]]
