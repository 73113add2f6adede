"""Small tokenizers with the markers of well-known models: as special tokens, as other added tokens, and as plain text.

The lists of added tokens are those of the models' tokenizer.json; their other vocabulary is bytes and a few merges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from millrace.text.tokenizers.hf_tokenizer import build_hf_tokenizer
from millrace.text.tokenizers.token_table import CHAR_OF_BYTE
from millrace.text.tokenizers.tokenizer import Tokenizer

Kind = Literal["special", "added", "plain"]
KINDS: tuple[Kind, ...] = ("special", "added", "plain")
MERGES = (("<", "/"), (">", "Ċ"), ("Ċ", "Ċ"), ("{", '"'), ('"', ":"), ('"', "}"), ("c", "all"), ("a", "l"), ("al", "l"))
"""Tokens that cross the ends of markers which are plain text."""
MESSAGES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@dataclass(frozen=True, slots=True)
class Shape:
    ends: tuple[str, ...]
    """The tokens that end an answer, which are special in every kind."""
    markers: tuple[str, ...]
    others: tuple[str, ...] = ()
    """Further tokens that are added and not special."""
    shown: str = ""
    """What the chat template writes where there are tools, apart from the markers."""


_DEEPSEEK_TOOLS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_FIM = tuple(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep"))
_HARMONY = ("<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>")
SHAPES = {
    "qwen2.5": Shape(("<|im_end|>", "<|endoftext|>"), ("<tool_call>", "</tool_call>"), _FIM),
    "qwen3": Shape(
        ("<|im_end|>", "<|endoftext|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        (*_FIM, "<tool_response>", "</tool_response>"),
    ),
    "deepseek-r1": Shape(
        ("<｜end▁of▁sentence｜>",),
        ("<think>", "</think>", *_DEEPSEEK_TOOLS),
        ("<｜User｜>", "<｜Assistant｜>", "<｜fim▁hole｜>"),
        "```json",
    ),
    "gpt-oss": Shape(("<|return|>", "<|call|>"), _HARMONY, (), "<|channel|>commentary <|channel|>analysis"),
    "mistral": Shape(("</s>",), ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), ("[INST]", "[/INST]")),
}


def write_model(directory: Path, name: str, kind: Kind) -> dict[str, Any]:
    """Write the tokenizer's files, with a chat template, and config.json of a tiny model; returns the configuration."""
    shape = SHAPES[name]
    chars = [CHAR_OF_BYTE[byte] for byte in range(256)]
    words = dict.fromkeys([*chars, "al", "all", *("".join(pair) for pair in MERGES)])
    merges = sorted(MERGES, key=lambda pair: len("".join(pair)))
    backend = Backend(BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fields = json.loads(backend.to_str())
    tokens = [(text, True) for text in shape.ends] + [(text, False) for text in shape.others]
    tokens += [(text, kind == "special") for text in shape.markers if kind != "plain"]
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    fields["added_tokens"] = [
        {"id": len(words) + place, "content": text, **usual, "special": special}
        for place, (text, special) in enumerate(tokens)
    ]
    ends = [len(words) + place for place in range(len(shape.ends))]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(words) + len(tokens),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": ends,
    }
    template = f"{{% if tools %}}{''.join(shape.markers)}{shape.shown}{{{{ tools }}}}{{% endif %}}{MESSAGES}"
    settings = {"eos_token": shape.ends[0], "chat_template": template}
    for file, content in (("tokenizer.json", fields), ("tokenizer_config.json", settings), ("config.json", config)):
        (directory / file).write_text(json.dumps(content), encoding="utf-8")
    return config


def tokenizer_of(directory: Path, name: str, kind: Kind) -> Tokenizer:
    return build_hf_tokenizer(directory, write_model(directory, name, kind))
