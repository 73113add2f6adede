"""Known adapters, and those of them in host memory. Files are read and checked in a thread of its own.

An adapter's content is named by the digest of its files: a directory whose files change is another version, which new
requests use, while open ones keep theirs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from millrace.errors import AdapterError, MillraceError
from millrace.models.adapters.read import Adapter

Result = TypeVar("Result")
Read = Callable[[Path], Adapter]
"""Reads, checks and copies an adapter to where slots are filled from. Raises AdapterError."""


@dataclass(slots=True)
class Known:
    """An adapter by name."""

    name: str
    path: Path
    is_added: bool = False
    """Added while the server ran."""
    digest: str = ""
    """Of the version that new requests use; empty until it was read."""
    num_bytes: int = 0
    max_rank: int = 0
    base_model: str = ""
    failure: str = ""
    """Why it could not be read last time."""
    loads: int = 0
    """Times that its files were read."""


@dataclass(slots=True)
class _Loading:
    known: Known
    future: Future[Adapter]


class AdapterStore:
    def __init__(self, read: Read, max_bytes: int) -> None:
        """`max_bytes`: of the adapters in memory that nobody uses; those in slots count too and are never dropped."""
        self._read = read
        self.max_bytes = max_bytes
        self._known: dict[str, Known] = {}
        self._held: OrderedDict[str, Adapter] = OrderedDict()
        """By digest, the least recently used first."""
        self._pins: dict[str, int] = {}
        """Slots by digest."""
        self._loading: dict[int, _Loading] = {}
        self._done: deque[_Loading] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self.num_evictions = 0
        self.num_loads = 0
        """Times that files were read."""

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __len__(self) -> int:
        return len(self._known)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def held_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._held.values())

    def names(self) -> list[str]:
        return sorted(self._known)

    def all(self) -> list[Known]:
        return [self._known[name] for name in self.names()]

    def get(self, name: str) -> Known | None:
        return self._known.get(name)

    def declare(self, name: str, path: Path, *, is_added: bool = False) -> Known:
        """Its files are read when a request first needs them, or by `load`. A known name gets the new path."""
        known = self._known.get(name)
        if known is None or known.path != path:
            known = self._known[name] = Known(name, path, is_added)
        known.is_added = known.is_added or is_added
        return known

    def register(self, known: Known) -> None:
        """It takes the place of what had its name."""
        self.forget(known.name)
        self._known[known.name] = known

    def run(self, work: Callable[[], Result]) -> Future[Result]:
        """In the thread that reads files."""
        return self._thread.submit(work)

    def loads(self, known: Known) -> bool:
        """True while its files are being read."""
        return id(known) in self._loading

    def forget(self, name: str) -> bool:
        """New requests do not find it any more. What is in memory leaves it when nobody uses it."""
        known = self._known.pop(name, None)
        if known is None:
            return False
        if known.digest and all(other.digest != known.digest for other in self._known.values()):
            self._drop_unused(known.digest)
        return True

    def adapter(self, known: Known) -> Adapter | None:
        """Its matrices, if they are in memory."""
        found = self._held.get(known.digest) if known.digest else None
        if found is not None:
            self._held.move_to_end(known.digest)
        return found

    def load(self, known: Known) -> None:
        """Read its files in the thread, also if they were read before. `take_done` returns it."""
        if not self.loads(known):
            loading = self._loading[id(known)] = _Loading(known, self._thread.submit(self._read, known.path))
            loading.future.add_done_callback(lambda _: self._done.append(loading))

    def take_done(self) -> list[Known]:
        """Adapters whose files were read since the last call; `failure` says why one was not."""
        done = []
        while self._done:
            loading = self._done.popleft()
            known = loading.known
            self._loading.pop(id(known), None)
            done.append(known)
            try:
                adapter = loading.future.result()
            except MillraceError as error:
                known.failure = error.message
                continue
            except Exception as error:
                known.failure = f"The adapter {known.name!r} could not be read: {error or type(error).__name__}"
                continue
            known.digest, known.failure = adapter.digest, ""
            known.num_bytes, known.max_rank = adapter.num_bytes, adapter.max_rank
            known.base_model = adapter.base_model
            known.loads += 1
            self.num_loads += 1
            self._held[adapter.digest] = adapter
            self._held.move_to_end(adapter.digest)
            self._evict(adapter.digest)
        return done

    def pin(self, digest: str) -> None:
        self._pins[digest] = self._pins.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]
            if all(known.digest != digest for known in self._known.values()):
                self._drop_unused(digest)
            self._evict()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _evict(self, newest: str = "") -> None:
        """Down to the limit, without those in slots and the newest, which somebody waits for."""
        for digest in list(self._held):
            if self.held_bytes <= self.max_bytes:
                return
            if digest not in self._pins and digest != newest:
                del self._held[digest]
                self.num_evictions += 1

    def _drop_unused(self, digest: str) -> None:
        if digest not in self._pins:
            self._held.pop(digest, None)


def parse_adapters(text: str) -> dict[str, str]:
    """NAME=PATH,NAME=PATH; a path may be a hub name."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise AdapterError(f"adapters has {item!r}; write NAME=PATH, several with commas.", param="adapters")
        check_name(name)
        if name in found:
            raise AdapterError(f"adapters names {name!r} twice.", param="adapters")
        found[name] = path
    return found


def check_name(name: str) -> None:
    is_plain = name and len(name) <= 128 and all(part.isalnum() or part in "-_./" for part in name)
    if not is_plain:
        raise AdapterError(
            f"{name[:200]!r} is no name for an adapter: use letters, digits and - _ . / (at most 128).", param="name"
        )
