"""Reloading of settings: a running server takes over those that are live, in every front, and names the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from millrace.config import Config, replace
from millrace.errors import MillraceError
from millrace.observe.logs import set_level
from millrace.settings_changes import ServerSettings, server_changes, with_live_changes, with_live_model_changes

if TYPE_CHECKING:
    from millrace.supervise.fronts import Fronts

log = logging.getLogger("millrace.serve")


class Reloader:
    """`read` gives the settings as a new start would read them; `use` takes them over in this front, and `use_models`
    those of each model, by name."""

    def __init__(
        self,
        settings: ServerSettings,
        use: Callable[[Config], None],
        use_models: Callable[[Mapping[str, Config]], None],
        fronts: Fronts,
        read: Callable[[], ServerSettings],
        on_done: Callable[[ServerSettings], None],
    ) -> None:
        self._settings = settings
        self._use = use
        self._use_models = use_models
        self._fronts = fronts
        self._read = read
        self._on_done = on_done

    def reload(self) -> None:
        """Settings that cannot be read change nothing."""
        before = self._settings
        try:
            after = as_started(self._read(), before)
        except MillraceError as error:
            log.error("The settings were not reloaded: %s", error.message)
            return
        found = server_changes(before, after)
        config = with_live_changes(before.config, after.config)
        models = {
            name: with_live_model_changes(own, after.models[name]) if name in after.models else own
            for name, own in before.models.items()
        }
        self._settings = ServerSettings(config, models)
        set_level(config.observe.log_level)
        self._use(config)
        self._fronts.use_settings(config)
        self._use_models(models)
        self._on_done(self._settings)
        log.warning("Settings reloaded: %s.", "; ".join(map(str, found)) or "nothing changed")


def as_started(wanted: ServerSettings, running: ServerSettings) -> ServerSettings:
    """`wanted` with the values that a start chooses for automatic settings, so that they do not count as changes."""
    chosen: dict[str, object] = {}
    if not wanted.config.server.fronts:
        chosen["server__fronts"] = running.config.server.fronts
    if not wanted.config.server.port:
        chosen["server__port"] = running.config.server.port
    return ServerSettings(replace(wanted.config, **chosen), wanted.models)
