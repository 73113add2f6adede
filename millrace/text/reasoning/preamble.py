"""What may stand before an answer that is held to a grammar: reasoning, in Lark notation."""

from __future__ import annotations

import json

from millrace.text.grammar.patterns import free_text
from millrace.text.reasoning.formats import ReasoningFormat
from millrace.text.tokenizers.tokenizer import MarkerId

RULE = "before"
"""The rule that the text of `preamble` defines."""
MAX_MESSAGES = 4
"""Most messages of reasoning on Harmony's channel."""
BREAK = r"/\n{0,2}/"
"""What may stand between the reasoning and the answer."""


def preamble(spec: ReasoningFormat, marker_id: MarkerId, *, is_open: bool, head: str = "") -> str:
    """`is_open`: the prompt has begun the reasoning. Otherwise the answer may do without. `head`: what stands between
    the reasoning and the answer, as Lark tokens."""
    if spec.name == "harmony":
        return _channels(marker_id, head)
    start, rules = _start(spec, marker_id), []
    end_id = marker_id(spec.end)
    if end_id is None:  # A lazy rule ends with the first occurrence of its text.
        free = "thoughts"
        rules.append(f"thoughts[lazy]: /(?s:.*)/ {json.dumps(spec.end)}")
    else:  # Special tokens cannot be inside of a lazy rule, nor inside of free text.
        free = f"THOUGHTS <[{end_id}]>"
        rules.append(f"THOUGHTS: {free_text(spec.end)}")
    # The model may repeat the start marker although the prompt has it; as ordinary text it is part of the thoughts.
    repeated = f"( {start} )? {free} {BREAK}" if start.startswith("<[") else f"{free} {BREAK}"
    reasoning = repeated if is_open else f"( {start} {free} {BREAK} )?"
    return "\n".join([f"{RULE}: {reasoning} {head}", *rules])


def _channels(marker_id: MarkerId, head: str) -> str:
    parts = [_token(marker, marker_id) for marker in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")]
    channel, message, end, start = parts
    text = "TEXT" if end.startswith("<[") else "text"
    rule = f"TEXT: {free_text('<|end|>')}" if text == "TEXT" else f"text[lazy]: /(?s:.*)/ {end}"
    closing = end if text == "TEXT" else ""
    thought = f'{channel} "analysis" {message} {text} {closing} {start} "assistant"'
    return f"{RULE}: ( {thought} ){{0,{MAX_MESSAGES}}} {head}\n{rule}"


def _start(spec: ReasoningFormat, marker_id: MarkerId) -> str:
    if spec.special and marker_id(spec.start) is None and marker_id(spec.special) is not None:
        return f"{_token(spec.special, marker_id)} {json.dumps(spec.start.removeprefix(spec.special))}"
    return _token(spec.start, marker_id)


def _token(text: str, marker_id: MarkerId) -> str:
    token_id = marker_id(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
