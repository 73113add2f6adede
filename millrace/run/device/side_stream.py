"""A CUDA stream beside the one that steps run on, for the copies to the device and back.

Streams wait for each other on the device; the host waits for neither. Every buffer that two of them share lives as long
as its owner, so that none is given to somebody else while a copy still uses it.
"""

from __future__ import annotations

import torch


class SideStream:
    def __init__(self) -> None:
        self.steps = torch.cuda.current_stream()
        """The stream that steps run on. To ask for it anew in every step would take longer than to record an event."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # A wait is for what its mark stood for at that moment, so one mark does for all.
        self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        """What is queued from here on is queued on this stream."""
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.steps)

    def follow_steps(self) -> None:
        """What comes next here waits for all that has been queued on the steps' stream."""
        self._mark.record(self.steps)
        self._stream.wait_event(self._mark)

    def lead_steps(self) -> None:
        """What comes next on the steps' stream waits for all that has been queued here."""
        self._mark.record(self._stream)
        self.steps.wait_event(self._mark)

    def record(self, event: torch.cuda.Event) -> None:
        """The event stands for all that has been queued here."""
        event.record(self._stream)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """What comes next here waits for the event; not at all if nobody has recorded it yet."""
        self._stream.wait_event(event)
