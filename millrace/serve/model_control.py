"""Loading and unloading of models, as a front asks for it. The process that supervises the engines does it."""

from __future__ import annotations

from typing import Protocol

from millrace.errors import BadRequest


class ModelControl(Protocol):
    """Models are named as in `ServedModel.name`. Whether a model was loaded shows in its client."""

    async def load(self, name: str) -> None:
        """Start loading the model, unless it is loaded or loading."""

    async def unload(self, name: str) -> None:
        """Unload the model when no request needs it any more."""

    async def keep_alive(self, name: str, seconds: float) -> None:
        """Unload the model once it has been idle this long; negative: never. Holds until it is unloaded."""


class FixedModels:
    """For a front whose engines belong to somebody else, such as the benchmark of fronts."""

    async def load(self, name: str) -> None:
        pass

    async def unload(self, name: str) -> None:
        raise BadRequest("This server cannot unload its model; stop the server instead.", param="model")

    async def keep_alive(self, name: str, seconds: float) -> None:
        if seconds == 0:
            await self.unload(name)
