"""Keeps one engine process ready that has imported everything and waits for its settings.

Imports are most of the time that a small model takes to load: seconds, and many of them on a busy machine. The spare
holds no weights, no KV and nothing on a GPU. It is started when a model is unloaded and no other is being loaded.
"""

from __future__ import annotations

from millrace.supervise.engine_process import EngineChild, start_child


class SpareEngine:
    def __init__(self, num_fronts: int) -> None:
        self._num_fronts = num_fronts
        self._waiting: EngineChild | None = None

    def prepare(self) -> None:
        """Start a spare, unless one waits."""
        if self._waiting is None or self._waiting.process.poll() is not None:
            self.close()
            self._waiting = start_child(self._num_fronts, is_spare=True)

    def take(self) -> EngineChild | None:
        """The process that waits, if there is one. It is the caller's from now on."""
        child, self._waiting = self._waiting, None
        if child is not None and child.process.poll() is not None:
            child.discard()
            return None
        return child

    def close(self) -> None:
        child, self._waiting = self._waiting, None
        if child is not None:
            child.discard()
