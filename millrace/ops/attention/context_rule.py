"""How the keys before a prompt's tokens are shared out where there are few of these: by several programs to a tile."""

from __future__ import annotations

from millrace.ops.attention.decode_rule import SMS

MOST_PARTS = 8
"""Programs that share the keys of one tile. Two tiles of eight KV heads are then 128 programs; more parts, of fewer
tiles, would each have less to do than their join."""


def context_parts(num_tiles: int, num_kv_heads: int) -> int:
    """As many as make one round of programs, of which a multiprocessor has room for one."""
    return max(1, min(MOST_PARTS, SMS // (num_tiles * num_kv_heads)))
