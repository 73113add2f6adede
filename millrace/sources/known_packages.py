"""How a model lies in packages of a registry.

The packages are downloaded with the registry's normal client (pip, uv or npm). Their members, joined in order, are the
model file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Registry = Literal["pypi", "npm"]


@dataclass(frozen=True, slots=True)
class Package:
    """One archive in a registry, and the member file with a part of the model."""

    registry: Registry
    name: str
    version: str
    member: str
    archive_bytes: int
    """Size of the archive, for the progress display and the disk check."""


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of a model that is a directory, beside its weights."""

    path: str
    """In the model's directory."""
    member: str
    """In the model's first package."""
    sha256: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model assembled from packages. `sha256` and `num_bytes` are of the assembled file: its weights."""

    name: str
    aliases: tuple[str, ...]
    title: str
    packages: tuple[Package, ...]
    """In the order in which the members are joined."""
    num_bytes: int
    sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Recommended sampling, for files that name none."""
    chat_template: str = ""
    """The built-in chat template that replaces the file's own, where that one does not work."""
    weights: str = ""
    """Of a model that is a directory: the path of its weights there. "": a single GGUF file."""
    files: tuple[FolderFile, ...] = ()
    """The directory's other files."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Files that the package lacks, by path: what the model's authors say of it."""

    @property
    def file_name(self) -> str:
        """Path of the weights below the folder of all models."""
        return f"{self.name}/{self.weights}" if self.weights else f"{self.name}.gguf"

    @property
    def download_bytes(self) -> int:
        return sum(package.archive_bytes for package in self.packages)
