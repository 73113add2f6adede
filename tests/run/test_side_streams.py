"""Packets and drawn tokens on side streams: each step reads its own packet and returns its own tokens, in any
interleaving of the streams. Simulated without a GPU; with one, also run for real."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.fake_streams import PLACE, Streams, fake_streams

from millrace.config import RunConfig
from millrace.run.device.device import CudaDevice, Pending, open_device
from millrace.run.device.host_gate import open_gates
from millrace.run.packet.mask_ring import MaskRing
from millrace.run.packet.packet_ring import RING, PacketRing, TokenRing

WORDS, ROWS = 3000, 5


class Steps:
    """Like CudaRunner: two kernels of a step read the packet, and the last one draws."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr("millrace.run.device.device.prepare_triton_key", lambda: None)
            self.device = CudaDevice()
        self.ring, self.drawn = PacketRing(WORDS, PLACE), TokenRing(ROWS, PLACE)
        self.seen: list[tuple[int, int, int]] = []

    def launch(self, number: int, rows: int) -> Pending[torch.Tensor]:
        return self.device.launch(lambda: self._work(number, rows), self._copy_to_host)

    def _work(self, number: int, rows: int) -> torch.Tensor:
        packet = self.ring.next()
        self.streams.run_some()
        packet[0], packet[1], packet[2], packet[-1] = number, self.drawn.start(self.ring.turn), rows, number
        self.ring.send(WORDS)
        place = self.ring.on_device
        self.streams.queue(lambda: self.seen.append((number, int(place[0]), int(place[-1]))))
        self.streams.queue(lambda: self._draw(place))
        return self.drawn.device_tokens(self.ring.turn, rows)

    def _draw(self, packet: torch.Tensor) -> None:
        number, start, rows = packet[:3].tolist()
        self.drawn.on_device[start : start + rows] = number + torch.arange(rows, dtype=torch.int32)

    def _copy_to_host(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drawn.host_tokens(self.ring.turn, len(tokens)).copy_(tokens, non_blocking=True)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_steps_read_their_own_packets_and_return_their_own_tokens(in_flight: int) -> None:
    for seed in range(60):
        with fake_streams(seed) as streams:
            steps, flying = Steps(streams), deque()
            for number in range(1, 14):
                rows = streams.rng.randrange(ROWS + 1)
                flying.append((number, rows, steps.launch(number * 100, rows)))
                if len(flying) == in_flight:
                    check(*flying.popleft())
                streams.run_some()
            while flying:
                check(*flying.popleft())
        assert steps.seen == [(number * 100,) * 3 for number in range(1, 14)]


def check(number: int, rows: int, pending: Pending[torch.Tensor]) -> None:
    assert pending.wait().tolist() == [number * 100 + row for row in range(rows)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_that_lags_behind() -> None:
    device = open_device(RunConfig(device="cuda"))
    place = device.torch_device
    ring, drawn = PacketRing(WORDS, place), TokenRing(ROWS, place)
    heavy = torch.randn(2048, 2048, device=place)

    def work(number: int) -> torch.Tensor:
        ring.next()[:] = number
        ring.send(WORDS)
        for _ in range(20):
            heavy @ heavy
        line = drawn.device_tokens(ring.turn, ROWS)
        torch.add(ring.on_device[-ROWS:], 1, out=line)
        return line

    def copy_to_host(tokens: torch.Tensor) -> torch.Tensor:
        return drawn.host_tokens(ring.turn, len(tokens)).copy_(tokens, non_blocking=True)

    flying: deque[tuple[int, Pending[torch.Tensor]]] = deque()
    for number in range(200):
        flying.append((number, device.launch(lambda number=number: work(number), copy_to_host)))
        if len(flying) > 2:
            expected, pending = flying.popleft()
            assert (pending.wait().numpy() == np.full(ROWS, expected + 1)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_early", [False, True])
def test_masks_are_copied_when_they_are_ready(is_early: bool) -> None:
    """Queued by another thread, before or after the host has computed them."""
    place = open_device(RunConfig(device="cuda")).torch_device
    if (gates := open_gates(RING)) is None:
        pytest.skip("this driver has no waits for the host")
    ring = MaskRing(WORDS, place, gates=gates)
    ring.address(0, ROWS)
    seen = torch.zeros((ROWS, WORDS), dtype=torch.int32, device=place)
    # A kernel's first use loads it, and that waits for the whole device: not behind a closed gate.
    seen.copy_(ring.on_device[0][:ROWS])
    assert (seen == 0).all()

    def queue(turn: int) -> torch.cuda.Event:
        ring.send_when_ready(turn, ROWS)
        seen.copy_(ring.on_device[turn][:ROWS])
        done = torch.cuda.Event()
        done.record()
        return done

    with ThreadPoolExecutor(1) as thread:
        for number in range(3 * RING):
            turn = number % RING
            ring.address(turn, ROWS)
            bits = ring.host(turn, ROWS)
            queued = thread.submit(queue, turn)
            try:
                done = None if is_early else queued.result(60)
                time.sleep(0.001)
                assert done is None or not done.query()
                bits[:] = number + 1
            finally:
                ring.ready(turn)
            queued.result(60).synchronize()
            assert (seen == number + 1).all()
