"""A model so small that a server of it starts and answers fast, for tests that are not about what it says."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "tiny"
CONTEXT = 32768
"""So long that a stream of as many tokens runs until a test ends it."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 299,
    "bos_token_id": 298,
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def tiny_source(directory: Path) -> str:
    """Write the model's file; returns its source."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return f"random:{directory / 'config.json'}"


def tiny_options(directory: Path) -> tuple[str, ...]:
    """Write the model's files; returns the options of its server."""
    (directory / "template.jinja").write_text(TEMPLATE)
    return (
        *(tiny_source(directory), "--served-name", NAME, "--kv-tokens", str(5 * CONTEXT)),
        *("--chat-template", str(directory / "template.jinja"), "--data-dir", str(directory / "data")),
    )
