"""Shadow traffic: a share of the requests is copied to a group of replicas, and its answers are read and counted only.

A copy is sent when the client has its answer, so it delays nobody; above `MAX_OPEN` copies at once, none is sent.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from millrace.errors import BadRequest
from millrace.gateway.replica import Replica
from millrace.gateway.rollout.canary import place_of
from millrace.serve.tenancy.cache_scope import SALT_HEADER
from millrace.serve.tenancy.owner import OWNER_HEADER

MAX_OPEN = 16
_OWN = frozenset({SALT_HEADER, OWNER_HEADER})
"""Headers that only Millrace knows."""
TIMEOUT_S = 300.0
_TEXT = re.compile(rb'"(?:text|content|response)": ?"((?:[^"\\]|\\.)*)"')


class ShadowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: str
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.group or not 0 < self.share <= 1:
            raise BadRequest("Shadow traffic needs a 'group' and a 'share' above 0, up to 1.", param="shadow")


class Shadow:
    def __init__(self, settings: ShadowSettings, session: aiohttp.ClientSession) -> None:
        self.settings = settings
        self._session = session
        self.num_sent = self.num_failed = self.num_skipped = self.num_compared = self.num_same = 0
        self.own_s = self.client_s = 0.0
        """Time of the copies that were answered, and of the requests that they are copies of."""
        self._tasks: set[asyncio.Task[None]] = set()

    def copy(
        self,
        replicas: Sequence[Replica],
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        request_id: str,
        took_s: float,
        answer: bytes,
    ) -> None:
        """`answer`: what the client got, to compare; empty if it was streamed."""
        if not replicas or place_of(request_id) >= self.settings.share:
            return
        if len(self._tasks) >= MAX_OPEN:
            self.num_skipped += 1
            return
        replica = min(replicas, key=lambda one: len(one.attempts))
        task = asyncio.get_running_loop().create_task(self._ask(replica, path, body, headers, took_s, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(
        self,
        replica: Replica,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        took_s: float,
        answer: bytes,
    ) -> None:
        copied = {**body, "stream": False, **({"store": False} if "store" in body or path == "/v1/responses" else {})}
        salt = headers.get(SALT_HEADER, "")
        if not replica.is_millrace:
            headers = {name: value for name, value in headers.items() if name not in _OWN}
        sent = replica.salted_body(path, msgspec.json.encode(copied), salt)
        headers = {**headers, "Content-Type": "application/json"}
        began = time.monotonic()
        self.num_sent += 1
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._session.post(
                    replica.settings.url + path, data=sent, headers={**headers, "Content-Type": "application/json"}
                ) as response,
            ):
                data, status = await response.read(), response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.num_failed += 1
            return
        if status >= 500:
            self.num_failed += 1
            return
        self.own_s += time.monotonic() - began
        self.client_s += took_s
        if answer:
            self.num_compared += 1
            self.num_same += _TEXT.findall(answer) == _TEXT.findall(data)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def describe(self) -> dict[str, Any]:
        return {
            "group": self.settings.group,
            "share": self.settings.share,
            "sent": self.num_sent,
            "failed": self.num_failed,
            "skipped": self.num_skipped,
            "compared": self.num_compared,
            "same_text": self.num_same,
            "time_over_clients": round(self.own_s / self.client_s, 3) if self.client_s else None,
        }
