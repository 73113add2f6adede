"""How long to wait before a process that ended is started again."""

from __future__ import annotations

from millrace.fleet.settings import FleetSettings


class BackOff:
    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self.num_failures = 0
        """In a row."""

    def after(self, ran_s: float) -> float:
        """Seconds to wait after a process that ran for `ran_s`."""
        if ran_s >= self._settings.steady_s:
            self.num_failures = 0
        self.num_failures += 1
        wait_s: float = self._settings.back_off_s * 2 ** min(self.num_failures - 1, 30)
        return min(wait_s, self._settings.max_back_off_s)
