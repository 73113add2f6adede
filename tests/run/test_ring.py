"""The ring between ranks: records arrive whole and in order, and an end that is gone is noticed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from millrace.run.ranks.ring import RingClosed, RingReader, RingWriter

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

SIZE, LIMIT_S, SAYS = 4096, 60.0, 7


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    """Both ends in this process."""
    writer = RingWriter(SIZE)
    reader = RingReader(*map(os.dup, writer.far_fds), SIZE)
    writer.started()
    yield writer, reader
    writer.close()
    reader.close()


def test_records_of_all_sizes_arrive_whole_and_in_order(ring: tuple[RingWriter, RingReader]) -> None:
    """Also those larger than the ring, and all that its end cuts off."""
    writer, reader = ring
    rng = random.Random(0)
    sent = [(index % 3, rng.randbytes(rng.choice([0, 1, 90, 700, 3 * SIZE]))) for index in range(400)]
    replies: list[bytes] = []

    def listen() -> None:
        while len(replies) < len(sent):
            replies.append(writer.read_reply().body)

    def write() -> None:
        for kind, data in sent:
            writer.write(kind, data, LIMIT_S)

    threads = [threading.Thread(target=work, daemon=True) for work in (listen, write)]
    for thread in threads:
        thread.start()
    found = []
    for _ in sent:
        found.append(reader.read())
        reader.reply(SAYS, len(found).to_bytes(4, "little"))
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == sent
    assert replies == [index.to_bytes(4, "little") for index in range(1, len(sent) + 1)]


def test_a_full_ring_is_waited_for_only_so_long(ring: tuple[RingWriter, RingReader]) -> None:
    writer, _ = ring
    with pytest.raises(TimeoutError):
        writer.write(0, bytes(2 * SIZE), 0.01)


def test_each_end_notices_that_the_other_is_gone(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    reader.close()
    with pytest.raises(RingClosed):
        writer.read_reply()
    with pytest.raises(RingClosed):
        writer.write(0, b"1", LIMIT_S)


def test_a_writer_that_closes_ends_the_reader(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    writer.write(1, b"last", LIMIT_S)
    writer.close()
    assert reader.read() == (1, b"last")
    with pytest.raises(RingClosed):
        reader.read()
    with pytest.raises(RingClosed):
        writer.write(0, b"1", LIMIT_S)
