"""The state pool that a runner's settings ask for."""

from __future__ import annotations

from millrace.models.decoder import Decoder
from millrace.run.device.device import Device
from millrace.run.device.state_pool import StatePool
from millrace.run.settings import RunnerSettings


def make_state_pool(decoder: Decoder, device: Device, settings: RunnerSettings) -> StatePool | None:
    """None if the model has no recurrent layer. The last row is of padding."""
    if decoder.spec.recurrent is None:
        return None
    return StatePool(
        decoder.spec,
        device,
        decoder.dtype,
        num_rows=settings.max_rows + 1,
        num_places=settings.state_places,
        num_slots=settings.state_slots,
    )
