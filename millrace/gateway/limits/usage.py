"""The tokens that an answer says it used, in every dialect. Read only where an answer has the field."""

from __future__ import annotations

import re

_FIELD = re.compile(
    rb'"(prompt_tokens|input_tokens|prompt_eval_count|completion_tokens|output_tokens|eval_count)": ?(\d{1,12})\b'
)
_PROMPT = frozenset({b"prompt_tokens", b"input_tokens", b"prompt_eval_count"})


class UsageReader:
    """The largest counts seen: streams repeat them, from the first frame or only at their end."""

    def __init__(self) -> None:
        self.prompt_tokens = self.output_tokens = 0

    def read(self, data: bytes) -> None:
        if b"_tokens" not in data and b"eval_count" not in data:
            return
        for name, count in _FIELD.findall(data):
            if name in _PROMPT:
                self.prompt_tokens = max(self.prompt_tokens, int(count))
            else:
                self.output_tokens = max(self.output_tokens, int(count))
