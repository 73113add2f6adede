"""Which replica probably has which prefix: what this gateway sent where, corrected by the replicas' KV events.

A prompt is a chain of chunk hashes over its text. The gateway has no tokenizer: after the first request with a prompt
it asks a replica for the token ids, off the request's path, and notes for each chunk the key of the last whole KV block
that it covers. From then on the events of the replicas decide, not the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from millrace.gateway.routing.candidates import CHUNK_BYTES, CHUNK_TOKENS

MAX_CHUNKS = 200_000
"""Chunks remembered per replica, and chunks with known keys: about 13 million tokens."""
_KEY_BYTES = 8


def chain_of(text: bytes, salt: bytes = b"") -> tuple[str, ...]:
    """A hash per whole chunk of the text; each covers all before it. `salt`: model and tenant."""
    found: list[str] = []
    parent = salt
    for start in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES):
        digest = blake2b(parent, digest_size=_KEY_BYTES)
        digest.update(text[start : start + CHUNK_BYTES])
        parent = digest.digest()
        found.append(parent.hex())
    return tuple(found)


class HeldBlocks:
    """The block keys that one replica holds, from its events. A gap in their numbers makes it unknown."""

    def __init__(self) -> None:
        self._tiers: dict[str, set[str]] = {}
        self._seq = -1

    def apply(self, seq: int, kind: str, tier: str, blocks: Iterable[str]) -> bool:
        """False if events are missing: the stream must be opened again, which begins with a snapshot."""
        held = self._tiers.setdefault(tier, set())
        if kind == "snapshot":
            held.clear()
            held.update(blocks)
        elif seq != self._seq + 1:
            return False
        elif kind == "filled":
            held.update(blocks)
        elif kind == "evicted":
            held.difference_update(blocks)
        elif kind == "cleared":
            held.clear()
        self._seq = seq
        return True

    def has_on_device(self, key: str) -> bool:
        return key in self._tiers.get("device", ())

    def __contains__(self, key: str) -> bool:
        return any(key in held for held in self._tiers.values())

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))


class PrefixMap:
    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._sent: dict[str, OrderedDict[str, None]] = {}
        """By replica, the chunks of prompts that it was sent, the least recent first."""
        self._held: dict[str, HeldBlocks] = {}
        self._keys: OrderedDict[str, str] = OrderedDict()
        """By chunk, the key of the last whole KV block that ends in or before it."""

    def matched_tokens(self, replica: str, chain: Sequence[str]) -> int:
        """Leading tokens of the prompt that the replica probably has."""
        sent, held = self._sent.get(replica, ()), self._held.get(replica)
        count = 0
        for chunk in chain:
            key = self._keys.get(chunk)
            is_there = key in held if held is not None and key else chunk in sent
            if not is_there:
                break
            count += 1
        return count * CHUNK_TOKENS

    def surely_on_device(self, replica: str, chain: Sequence[str]) -> int:
        """Leading tokens of the prompt that the replica's events say it has where others can fetch them."""
        held, count = self._held.get(replica), 0
        for chunk in chain if held is not None else ():
            key = self._keys.get(chunk)
            if held is None or not key or not held.has_on_device(key):
                break
            count += 1
        return count * CHUNK_TOKENS

    def sent_to(self, replica: str, chain: Sequence[str]) -> None:
        """Known from the moment of the decision on, so that equal prompts that come together go together."""
        sent = self._sent.setdefault(replica, OrderedDict())
        for chunk in chain:
            sent[chunk] = None
            sent.move_to_end(chunk)
        while len(sent) > self._max_chunks:
            sent.popitem(last=False)

    def knows_keys(self, chain: Sequence[str]) -> bool:
        return not chain or chain[-1] in self._keys

    def learn_keys(
        self, chain: Sequence[str], num_bytes: int, num_tokens: int, keys: Sequence[str], block: int
    ) -> None:
        """`keys` of the prompt's whole blocks of `block` tokens, in order. A chunk ends at about the same share of the
        tokens as of the bytes; an error of a block only moves where a prefix seems to end."""
        for number, chunk in enumerate(chain, start=1):
            tokens = num_tokens * number * CHUNK_BYTES // max(1, num_bytes)
            whole = min(tokens // block, len(keys))
            self._keys[chunk] = keys[whole - 1] if whole else ""
        while len(self._keys) > self._max_chunks:
            self._keys.popitem(last=False)

    def follow(self, replica: str) -> HeldBlocks:
        """The replica sends events, from a snapshot on."""
        self._held[replica] = HeldBlocks()
        return self._held[replica]

    def held_by(self, replica: str) -> HeldBlocks | None:
        """None if it sends no events."""
        return self._held.get(replica)

    def unfollow(self, replica: str) -> None:
        self._held.pop(replica, None)

    def forget(self, replica: str) -> None:
        """The replica was restarted or removed: its cache is empty."""
        self._held.pop(replica, None)
        self._sent.pop(replica, None)
