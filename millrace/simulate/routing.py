"""Which replica gets a request: the gateway's own policies and prefix map, asked as the gateway asks them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from millrace.gateway.routing.candidates import CHUNK_TOKENS, Asked, Candidate, Moment
from millrace.gateway.routing.policies import policy_named
from millrace.gateway.routing.prefix_map import PrefixMap
from millrace.gateway.routing.request_facts import ASSUMED_OUTPUT_TOKENS
from millrace.load.workload import BLOCK_TOKENS
from millrace.simulate.requests import SimulatedRequest


class Router:
    """Knows of replicas what a gateway knows: what it sent where, and what has ended since."""

    def __init__(self, policy: str, num_replicas: int, *, limit: int = 0, seed: int = 0) -> None:
        """`limit`: `max_tokens` of requests; 0: none, and the gateway assumes a length."""
        self._policy, self._limit, self._random = policy_named(policy), limit, random.Random(seed)
        self._names = [f"replica-{index}" for index in range(num_replicas)]
        self._prefixes, self._turn = PrefixMap(), 0
        self._open: list[dict[int, int]] = [{} for _ in range(num_replicas)]
        """By replica, the work of each open request."""
        self._work = [0] * num_replicas

    def choose(self, number: int, request: SimulatedRequest, able: Sequence[int]) -> int:
        """Index of the replica, of those that are up."""
        asked = Asked(
            id=str(number),
            model="",
            prompt_tokens=request.num_prompt,
            output_tokens=self._limit or ASSUMED_OUTPUT_TOKENS,
            chain=_chain(request),
            session=request.tenant,
        )
        candidates = [
            Candidate(
                name=self._names[index],
                outstanding_tokens=self._work[index],
                num_open=len(self._open[index]),
                matched_tokens=min(request.num_prompt, self._prefixes.matched_tokens(self._names[index], asked.chain)),
            )
            for index in able
        ]
        choice = self._policy.choose(asked, candidates, Moment(self._turn, self._random.random()))
        self._turn += 1
        index = self._names.index(choice.replica)
        matched = next(one.matched_tokens for one in candidates if one.name == choice.replica)
        self._prefixes.sent_to(choice.replica, asked.chain)
        work = self._open[index][number] = asked.prompt_tokens - matched + asked.output_tokens
        self._work[index] += work
        return index

    def ended(self, number: int, index: int) -> None:
        self._work[index] -= self._open[index].pop(number, 0)

    def lost(self, index: int) -> None:
        """The replica was restarted: its cache is empty, and its requests go elsewhere."""
        self._prefixes.forget(self._names[index])
        self._open[index].clear()
        self._work[index] = 0


def _chain(request: SimulatedRequest) -> tuple[str, ...]:
    """A name for each chunk of the part that it may share with others."""
    if request.prefix_tokens:
        return tuple(f"p{request.prefix}-{at}" for at in range(request.prefix_tokens // CHUNK_TOKENS))
    parent, found = b"", []
    for block in request.blocks[:-1]:
        parent = blake2b(parent + block.to_bytes(8, "little", signed=True), digest_size=8).digest()
        found += [f"{parent.hex()}-{at}" for at in range(BLOCK_TOKENS // CHUNK_TOKENS)]
    return tuple(found)
