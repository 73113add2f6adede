"""Models that clients made of served ones (Ollama's /api/create): a name for a model with an adapter, a system prompt
or sampling parameters of its own.

They are kept in the data directory: all fronts read the same file, and a server that is started again has them.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import BadRequest
from millrace.link.adapter_messages import AddAdapter
from millrace.params.defaults import SamplingDefaults

FOLDER = "created"
UNUSED_BLOBS_S = 24 * 3600.0
"""An uploaded file that no model uses is removed after this long."""
_MODELS, _BLOBS, _ADAPTERS = "models.json", "blobs", "adapters"
_LOCK_S = 10.0
MAX_NAME_CHARS = 110
"""With the end of `own_name`, an adapter's name is not too long."""
_HEX = frozenset("0123456789abcdef")


class CreatedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    """Name of the served model that it was made of."""
    adapter: str = ""
    """The adapter that answers; empty: the model itself. One that was uploaded for it is named by `own_name`."""
    digests: dict[str, str] = {}
    """Files of an adapter that was uploaded for it, by name; empty if the adapter is the server's own."""
    system: str = ""
    """System prompt of conversations that have none."""
    sampling: dict[str, float] = {}
    """By the names of `SamplingDefaults`."""
    options: dict[str, Any] = {}
    """Further options of Ollama's API, for its requests that leave them out."""
    stop: tuple[str, ...] = ()
    licence: str = ""
    created: int = 0

    def over(self, defaults: SamplingDefaults) -> SamplingDefaults:
        """The model's defaults with those of its maker."""
        given: dict[str, Any] = dict(self.sampling)
        if "top_k" in given:
            given["top_k"] = int(given["top_k"])
        return dataclasses.replace(defaults, **given, stop=self.stop, source=self.name)


def own_name(name: str) -> str:
    """Of the adapter that is uploaded for a model with this name, and of the directory of its files. It is another one
    each time, so that no model is made of the files of another."""
    plain = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
    return f"{plain[:MAX_NAME_CHARS]}-{secrets.token_hex(4)}"


class CreatedModels:
    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: that of the server's data; None: there are none."""
        self._directory = None if directory is None else directory / FOLDER
        self._seen: tuple[int, int, int] | None = None
        self._models: dict[str, CreatedModel] = {}

    def all(self) -> list[CreatedModel]:
        self._read_if_changed()
        return list(self._models.values())

    def get(self, name: str) -> CreatedModel | None:
        self._read_if_changed()
        return self._models.get(name)

    # -- what follows waits for the disk: call it in a thread --------------------------------------------------------

    def put(self, model: CreatedModel) -> CreatedModel | None:
        """Returns what had the name."""
        return self._change(model.name, model)

    def remove(self, name: str) -> CreatedModel | None:
        """Returns what had the name."""
        return self._change(name, None) if self.get(name) is not None else None

    def remove_files(self, model: CreatedModel) -> None:
        """Its own links to them; uploaded files that no model uses stay for a while."""
        shutil.rmtree(self.adapter_folder(model), ignore_errors=True)
        self.remove_unused_blobs()

    def adapter_folder(self, model: CreatedModel) -> Path:
        return self._root() / _ADAPTERS / model.adapter

    def make_adapter(self, model: CreatedModel) -> Path:
        """A directory with the adapter's files, which are uploaded blobs."""
        folder = self.adapter_folder(model)
        folder.mkdir(parents=True)
        for name, digest in model.digests.items():
            os.link(self.blob(digest), folder / name)
        return folder

    def blob(self, digest: str) -> Path:
        """Where an uploaded file is, or would be. Raises BadRequest for what is no digest."""
        kind, _, digits = digest.partition(":")
        if kind != "sha256" or len(digits) != 64 or not _HEX.issuperset(digits):
            raise BadRequest(f"{digest[:80]!r} is no digest; it is 'sha256:' and 64 hex digits.", param="digest")
        return self._root() / _BLOBS / f"sha256-{digits}"

    def remove_unused_blobs(self, older_than_s: float = UNUSED_BLOBS_S) -> None:
        """Blobs of models have another link, in their adapter's directory."""
        before = time.time() - older_than_s
        for path in (self._root() / _BLOBS).glob("*"):
            status = path.stat()
            if status.st_nlink == 1 and status.st_mtime < before:
                path.unlink(missing_ok=True)

    def _root(self) -> Path:
        if self._directory is None:
            raise BadRequest("This server keeps no models of clients.", param="model")
        return self._directory

    def _change(self, name: str, model: CreatedModel | None) -> CreatedModel | None:
        from filelock import FileLock  # 20 ms to import.

        root = self._root()
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "lock", timeout=_LOCK_S):
            self._read_if_changed()
            models = dict(self._models)
            before = models.pop(name, None)
            if model is not None:
                models[name] = model
            partial = root / f".{_MODELS}.{os.getpid()}"
            partial.write_bytes(_encode(models.values()))
            os.replace(partial, root / _MODELS)
            return before

    def _read_if_changed(self) -> None:
        if self._directory is None:
            return
        path = self._directory / _MODELS
        try:
            status = path.stat()
        except OSError:
            self._seen, self._models = None, {}
            return
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen != self._seen:
            self._models = {one.name: one for one in msgspec.json.decode(path.read_bytes(), type=list[CreatedModel])}
            self._seen = seen


def uploaded_adapters(created: CreatedModels, model: str) -> list[AddAdapter]:
    """Adapters that clients uploaded for a served model: its engines are told of them."""
    return [
        AddAdapter(one.adapter, str(created.adapter_folder(one)))
        for one in created.all()
        if one.model == model and one.digests
    ]


def _encode(models: Iterable[CreatedModel]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(list(models)), indent=2)
