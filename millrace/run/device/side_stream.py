"""A CUDA stream for copies to the device and back, beside the stream that steps run on.

The streams wait for each other on the device, never on the host. A buffer that both use lives as long as its owner, so
the allocator cannot hand it out again while a copy still uses it.
"""

from __future__ import annotations

import torch

from millrace.run.device.host_gate import HostGates


class SideStream:
    def __init__(self) -> None:
        self.steps = torch.cuda.current_stream()
        """The stream that steps run on. Kept, because looking it up takes longer than recording an event."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # A wait refers to the event's last recording at that moment, so one event is enough.
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        """Queue further work on this stream."""
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.steps)

    def follow_steps(self) -> None:
        """Make further work on this stream wait for all work queued on the steps' stream."""
        self._event.record(self.steps)
        self._stream.wait_event(self._event)

    def lead_steps(self) -> None:
        """Make further work on the steps' stream wait for all work queued on this one."""
        self._event.record(self._stream)
        self.steps.wait_event(self._event)

    def wait_for_host(self, gates: HostGates, turn: int, number: int) -> None:
        """Make further work on this stream wait until the host opens the turn's gate with this number."""
        gates.queue_wait(self._stream, turn, number)

    def record(self, event: torch.cuda.Event) -> None:
        """Record the event after all work queued on this stream."""
        event.record(self._stream)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Make further work on this stream wait for the event; an event never recorded is not waited for."""
        self._stream.wait_event(event)
