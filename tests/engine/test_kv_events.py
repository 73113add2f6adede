"""KV events of an engine: what a listener knows is what the cache holds, after fills, evictions and copies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_channel import FakeChannel

from millrace.engine.fronts.kv_events import MAX_KEYS, KvEventFeed
from millrace.link.messages import KV_KEY_BYTES, KvEvents
from millrace.plan.kv.block_hash import block_hash, root_hash
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.slot_index import SlotIndex


class Follower:
    """A gateway's view, from events alone."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {"device": set(), "host": set()}

    def apply(self, event: KvEvents) -> None:
        keys = {event.keys[at : at + KV_KEY_BYTES] for at in range(0, len(event.keys), KV_KEY_BYTES)}
        held = self.held[event.tier]
        if event.kind in ("snapshot", "cleared"):
            held.clear()
        (held.difference_update if event.kind == "evicted" else held.update)(keys)


def chain(seed: int, length: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Parent, hash and tokens of the blocks of a prompt."""
    parent = root_hash(b"")
    for number in range(length):
        tokens = np.array([seed, number, 0, 0], np.int32).tobytes()
        digest = block_hash(parent, tokens)
        yield parent, digest, tokens
        parent = digest


def events_in(channel: FakeChannel, front: int) -> list[KvEvents]:
    return [event[2] for event in channel.events if event[0] == "send" and event[1] == front]


def keys(digests: list[bytes]) -> set[bytes]:
    return {digest[:KV_KEY_BYTES] for digest in digests}


@pytest.mark.parametrize("seed", range(8))
def test_a_follower_knows_the_cache_after_any_fills_and_evictions(seed: int) -> None:
    rng = random.Random(seed)
    host = SlotIndex("host", 6)
    pool, channel = BlockPool(12, tiers=(host,)), FakeChannel(num_fronts=2)
    pool.withholds_dirty = False
    feed, follower, seen = KvEventFeed(channel, {"device": pool.named, "host": host}), Follower(), 0
    for turn in range(200):
        for parent, digest, tokens in chain(rng.randrange(6), rng.randrange(1, 6)):
            if pool.named.find(digest, tokens) is None and pool.num_available:
                [block] = pool.take_many(1)
                pool.named.register([block], [digest], [tokens], parent)
                pool.release([block], None)
            key = (0, digest)
            if rng.random() < 0.2 and key not in host and host.fill(key, tokens) is not None:
                host.filled(key, failed=rng.random() < 0.3)
        if turn == 20:
            feed.watch(1, is_on=True)
        feed.on_step(float(turn))
        sent = events_in(channel, 1)
        for event in sent[seen:]:
            follower.apply(event)
        seen = len(sent)
        if turn >= 20:
            assert follower.held == {"device": keys(pool.named.digests()), "host": keys(host.digests())}
    assert pool.num_evicted > 20
    assert events_in(channel, 0) == [], "front 0 does not listen"


def test_nothing_is_kept_while_nobody_listens() -> None:
    pool, channel = BlockPool(4), FakeChannel()
    feed = KvEventFeed(channel, {"device": pool.named})
    assert pool.named.journal is None
    feed.watch(0, is_on=True)
    assert pool.named.journal is not None
    feed.watch(0, is_on=False)
    assert pool.named.journal is None


def test_a_long_snapshot_is_sent_in_parts() -> None:
    pool, channel = BlockPool(MAX_KEYS + 5), FakeChannel()
    found = list(chain(1, MAX_KEYS + 5))
    blocks = pool.take_many(len(found))
    pool.named.register(blocks, [one[1] for one in found], [one[2] for one in found], found[0][0])
    KvEventFeed(channel, {"device": pool.named}).watch(0, is_on=True)
    first, rest = events_in(channel, 0)
    assert (first.kind, rest.kind) == ("snapshot", "filled")
    assert len(first.keys + rest.keys) == KV_KEY_BYTES * len(found)


def test_the_documented_key_is_the_key() -> None:
    """docs/replica-api.md computes it with hashlib alone."""
    page = (Path(__file__).parents[2] / "docs" / "replica-api.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    tokens = list(range(40))
    parent, expected = root_hash(b"acme\0"), []
    for start in (0, 16):
        parent = block_hash(parent, np.array(tokens[start : start + 16], np.int32).tobytes())
        expected.append(parent.hex()[:16])
    block_keys = names["block_keys"]
    assert callable(block_keys)
    assert block_keys(tokens, 16, "acme\0") == expected
