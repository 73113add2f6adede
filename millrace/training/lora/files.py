"""Writes an adapter as PEFT saves it, with a page on it and its curves."""

from __future__ import annotations

import html
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from millrace.load.svg import HEIGHT, WIDTH, Line, plot
from millrace.models.adapters.config import CONFIG_FILE, WEIGHTS_FILE
from millrace.training.loop import Curves
from millrace.training.lora.model import LoraMatrices
from millrace.training.lora.options import AdapterOptions


def write_adapter(folder: Path, base: str, matrices: dict[str, LoraMatrices], options: AdapterOptions) -> int:
    """The size of the file."""
    tensors = {}
    for name, own in matrices.items():
        for part, parameter in (("lora_A", own.lora_A), ("lora_B", own.lora_B)):
            stored = parameter.detach().to("cpu", torch.float32).contiguous()
            tensors[f"base_model.model.{name}.{part}.weight"] = stored
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": sorted(options.targets),
        "use_rslora": options.uses_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    path = folder / WEIGHTS_FILE
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path.stat().st_size


def write_curves(folder: Path, curves: Curves, title: str) -> None:
    held_out = [rates[0] for rates in curves.acceptance]
    lines = [Line("training", curves.steps, curves.losses), Line("held-out examples", curves.measured_at, held_out)]
    picture = plot(f"{title}: loss", lines, "step", "nats per token")
    (folder / "curves.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<title>{html.escape(title)}</title><rect width="100%" height="100%" fill="white"/>{picture}</svg>\n',
        encoding="utf-8",
    )


def write_card(folder: Path, base: str, command: str, text: str) -> None:
    page = f"""# A LoRA adapter for {base}

```
millrace serve {base} --adapters NAME=THIS_DIRECTORY
```

Trained with

```
{command}
```

{text}

![loss](curves.svg)
"""
    (folder / "README.md").write_text(page, encoding="utf-8")
