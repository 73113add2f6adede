"""The recorded figures of a peer on the same kind of GPU, and whether a figure of ours meets its bar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PEERS_FILE = Path(__file__).with_name("peers_h200.json")

MAIN_KEYS = {
    "startup": "seconds",
    "decode": "tpot_ms",
    "ttft": "ms",
    "mixed": "out_tok_s",
    "prefix": "seconds",
    "prefix_ttft": "warm_ms",
    "host": "host_ms",
}
"""The key of a JSON line that holds its figure. Higher is better only for tokens per second."""
_PLACES = {"decode": "batch", "ttft": "prompt", "mixed": "requests", "prefix": "requests", "host": "batch"}

Key = tuple[str, str, int]
"""Model, case, and the size within the case (0 if there is only one)."""


@dataclass(frozen=True, slots=True)
class PeerFigure:
    model: str
    case: str
    at: int
    peer: float | None = None
    bar: float | None = None
    goal: float | None = None

    def met_by(self, value: float) -> bool | None:
        """Compare with the bar, or without a bar with the peer; None if there is neither."""
        limit = self.bar if self.bar is not None else self.peer
        if limit is None:
            return None
        return value >= limit if MAIN_KEYS[self.case] == "out_tok_s" else value <= limit


@dataclass(frozen=True, slots=True)
class Peers:
    engine: str
    device: str
    """Substring of the names of devices for which these figures hold."""
    date: str
    source: str
    figures: Mapping[Key, PeerFigure]

    def verdict(self, record: Mapping[str, object]) -> dict[str, object]:
        """`peer`, `bar` and `ok` for a JSON line of ours, as far as known."""
        found = self.figures.get(key_of(record))
        value = value_of(record)
        if found is None or value is None:
            return {}
        known = {"peer": found.peer, "bar": found.bar, "ok": found.met_by(value)}
        return {name: item for name, item in known.items() if item is not None}


def load_peers(path: Path = PEERS_FILE) -> Peers:
    tree = json.loads(path.read_text(encoding="utf-8"))
    figures = [PeerFigure(**entry) for entry in tree["figures"]]
    by_key = {(figure.model, figure.case, figure.at): figure for figure in figures}
    return Peers(tree["engine"], tree["device"], tree["date"], tree["source"], by_key)


def key_of(record: Mapping[str, object]) -> Key:
    case = str(record.get("case", ""))
    at = record.get(_PLACES.get(case, ""), 0)
    return str(record.get("model", "")), case, at if isinstance(at, int) else 0


def value_of(record: Mapping[str, object]) -> float | None:
    value = record.get(MAIN_KEYS.get(str(record.get("case", "")), ""))
    return float(value) if isinstance(value, int | float) else None
