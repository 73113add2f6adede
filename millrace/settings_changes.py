"""What differs between the settings of a running server and those that it would read now, and what can change live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from millrace.config import Config, Setting, all_settings, replace
from millrace.model_settings import PER_MODEL

LIVE_SETTINGS = frozenset(
    (
        *("server.request_timeout_s", "server.drain_timeout_s", "server.body_limit_mb", "server.file_limit_mb"),
        *("server.ttft_interactive_s", "server.ttft_standard_s", "server.ttft_batch_s", "server.cors_origins"),
        *("server.manage_models", "observe.log_level", "observe.log_requests"),
    )
)
"""Settings that a running server can change (SIGHUP or `millrace reload`). The others need a restart."""
LIVE_PER_MODEL = frozenset(("model.keep_alive_s",))
"""The same for settings that each model has of its own."""


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    before: object
    after: object
    model: str = ""
    """Of a server with several models: which one it is about."""

    @property
    def is_live(self) -> bool:
        return self.key in LIVE_SETTINGS or self.key in LIVE_PER_MODEL

    @property
    def shown_key(self) -> str:
        """As the settings file writes it."""
        return f"models.{self.model}.{self.key.rpartition('.')[2]}".rstrip(".") if self.model else self.key

    def __str__(self) -> str:
        when = "now" if self.is_live else "needs a restart"
        return f"{self.shown_key}: {self.before!r} → {self.after!r} ({when})"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    config: Config
    """What all models share; its sections of models are only defaults."""
    models: Mapping[str, Config] = field(default_factory=dict)
    """By name in the API."""


def changes(before: Config, after: Config) -> list[Change]:
    """The settings in which two trees differ."""
    pairs = ((key, _get(before, entry), _get(after, entry)) for key, entry in all_settings().items())
    return [Change(key, old, new) for key, old, new in pairs if old != new]


def server_changes(before: ServerSettings, after: ServerSettings) -> list[Change]:
    """Those of the server first, then those of each model."""
    if not before.models:  # Announced by a version that did not list them.
        return changes(before.config, after.config)
    found = [one for one in changes(before.config, after.config) if one.key.partition(".")[0] not in PER_MODEL]
    return found + list(_model_changes(before.models, after.models))


def _model_changes(before: Mapping[str, Config], after: Mapping[str, Config]) -> Iterator[Change]:
    has_several = len(before) > 1 or len(after) > 1
    if not has_several and set(before) != set(after):  # The only model: its name changed, or another is served.
        yield Change("model.served_name", next(iter(before)), next(iter(after)))
        after = dict(zip(before, after.values(), strict=True))
    for name in dict.fromkeys((*before, *after)):
        if name not in after or name not in before:
            is_served = name in before
            yield Change("", "served" if is_served else "not served", "not served" if is_served else "served", name)
            continue
        for one in changes(before[name], after[name]):
            if one.key.partition(".")[0] in PER_MODEL and one.key != "model.served_name":
                yield Change(one.key, one.before, one.after, name if has_several else "")


def with_live_changes(before: Config, after: Config) -> Config:
    """`before` with those settings of `after` that can change while a server runs and that all models share."""
    live = {one.key.replace(".", "__"): one.after for one in changes(before, after) if one.key in LIVE_SETTINGS}
    return replace(before, **live)


def with_live_model_changes(before: Config, after: Config) -> Config:
    """The same for the settings of one model."""
    live = {one.key.replace(".", "__"): one.after for one in changes(before, after) if one.key in LIVE_PER_MODEL}
    return replace(before, **live)


def _get(config: Config, setting: Setting) -> object:
    return getattr(getattr(config, setting.section), setting.name)
