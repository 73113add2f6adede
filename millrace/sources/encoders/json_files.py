"""JSON files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.errors import ModelError


def json_file(path: Path, kind: type[Any]) -> Any:
    """The content of a JSON file; None if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}. Download the file again.") from error
    if not isinstance(content, kind):
        raise ModelError(f"{path} does not have the form that sentence-transformers writes. Download the file again.")
    return content
