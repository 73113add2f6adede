"""Cuts a wire log down to what the tests replay: `PYTHONPATH=tests python -m agents.record LOG.jsonl OUT.json`.

Every field name and type stays. Prompts and descriptions become a few words of ours; paths, ids and keys are replaced.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from agents.verdict import ENDS

MAX_CHARS = 60
"""Longer texts are replaced."""
KEPT_HEADERS = ("anthropic-version", "anthropic-beta", "user-agent", "accept", "x-session-affinity", "x-session-id")
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PATH = re.compile(r"(/[\w.-]+)+/(greeting\.py|README\.md)")


def main(log: Path, out: Path) -> None:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    asked = [line for line in lines if line["path"] in ENDS]
    # The first request with tools, the last, which has the results of all calls, and those without tools.
    of_tools = [line for line in asked if line["body"].get("tools")]
    kept = [*(line for line in asked if line not in of_tools), *of_tools[:1], *of_tools[1:][-1:]]
    ids: dict[str, str] = {}
    requests = [
        {
            "path": line["path"],
            "headers": {
                k.lower(): v.partition(" (")[0] for k, v in line["headers"].items() if k.lower() in KEPT_HEADERS
            },
            "body": _cut(line["body"], "", ids),
        }
        for line in kept
    ]
    out.write_text(json.dumps(requests, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cut(value: Any, name: str, ids: dict[str, str]) -> Any:
    """`name`: of the field that holds the value."""
    if isinstance(value, dict):
        return {key: _cut(part, key, ids) for key, part in value.items()}
    if isinstance(value, list):
        return [_cut(part, name, ids) for part in value]
    if not isinstance(value, str):
        return value
    if name == "description":
        return "What it is."
    if name == "arguments":
        return _PATH.sub(r"/repository/\2", value)
    if len(value) > MAX_CHARS:
        return "{}" if value.startswith("{") else "A text of the agent."
    text = _PATH.sub(r"/repository/\2", value)
    return _ID.sub(lambda found: ids.setdefault(found[0], f"00000000-0000-0000-0000-{len(ids):012}"), text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
