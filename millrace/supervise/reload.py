"""Reloading of settings: a running server takes over those that are live, in every front, and names the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.config import Config, changes, replace, with_live_changes
from millrace.errors import MillraceError
from millrace.observe.logs import set_level

if TYPE_CHECKING:
    from millrace.supervise.fronts import Fronts

log = logging.getLogger("millrace.serve")


class Reloader:
    """`read` gives the settings as a new start would read them; `use` takes them over in this front."""

    def __init__(
        self,
        config: Config,
        use: Callable[[Config], None],
        fronts: Fronts,
        read: Callable[[], Config],
        on_done: Callable[[Config], None],
    ) -> None:
        self._config, self._use, self._fronts, self._read, self._on_done = config, use, fronts, read, on_done

    def reload(self) -> None:
        """Settings that cannot be read change nothing."""
        before = self._config
        try:
            after = as_started(self._read(), before)
        except MillraceError as error:
            log.error("The settings were not reloaded: %s", error.message)
            return
        found = changes(before, after)
        config = self._config = with_live_changes(before, after)
        set_level(config.observe.log_level)
        self._use(config)
        self._fronts.use_settings(config)
        self._on_done(config)
        log.warning("Settings reloaded: %s.", "; ".join(map(str, found)) or "nothing changed")


def as_started(wanted: Config, running: Config) -> Config:
    """`wanted` with the values that a start chooses for automatic settings, so that they do not count as changes."""
    chosen: dict[str, object] = {}
    if not wanted.server.fronts:
        chosen["server__fronts"] = running.server.fronts
    if not wanted.server.port:
        chosen["server__port"] = running.server.port
    return replace(wanted, **chosen)
