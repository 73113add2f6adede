"""`millrace show`: what a model is, where it is, and what it needs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from millrace.errors import MillraceError
from millrace.sources.catalogue import find_entry
from millrace.sources.catalogue.check import last_check
from millrace.sources.estimate import estimate_lines
from millrace.sources.library import catalogue_bytes, is_downloaded
from millrace.sources.names import expand_alias, has_gpu, parse_name
from millrace.terminal.folding import folded

if TYPE_CHECKING:
    from millrace.sources.resolve import ModelFiles

USAGE = "millrace show MODEL [--json]"
EXAMPLES = """\
examples:
  millrace show smollm2
  millrace show llama3.1-8b --json"""

_CONFIG_NAMES = {
    "model_type": "family",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name, directory, .gguf file or hub name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    facts = _local_facts(args.model) if is_downloaded(args.model) else _catalogue_facts(args.model)
    if args.json:
        print(json.dumps(facts))
        return 0
    formats = facts.pop("formats", None)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {_shown(name, value, is_exact=facts['downloaded'] == 'yes')}")
    if formats:
        print(folded("\n" + "\n".join(_format_lines(formats))))
    if facts["bytes"]:
        print(folded("\n" + "\n".join(estimate_lines(args.model, int(facts["bytes"])))))
    return 0


def _shown(name: str, value: Any, *, is_exact: bool) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {x:g}" for key, x in value.items())
    if name == "parameters":
        return f"about {value / 1e9:.3g} billion"
    if name == "bytes" and not is_exact:
        return f"about {value / 1e9:.1f} GB"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _local_facts(source: str) -> dict[str, Any]:
    from millrace.sources.resolve import resolve_model
    from millrace.sources.sampling_defaults import sampling_defaults

    files = resolve_model(source, offline=True)
    facts: dict[str, Any] = {"name": files.name, "downloaded": "yes", "path": str(files.path), "format": files.kind}
    facts["bytes"] = sum(path.stat().st_size for path in files.weights)
    facts |= {shown: files.config[key] for key, shown in _CONFIG_NAMES.items() if files.config.get(key) is not None}
    recommended = sampling_defaults(files, "model")
    if recommended.fields():
        facts["sampling"] = recommended.fields()
        facts["sampling_source"] = recommended.source
    facts["formats"] = _formats(files)
    return facts


def _formats(files: ModelFiles) -> list[dict[str, Any]] | str:
    """The formats of the matrices and what multiplies them with default settings here; or why they cannot be served."""
    from millrace.config import Config
    from millrace.models.load import has_quantised_weights
    from millrace.models.weight_formats import weight_formats
    from millrace.run.device.device import open_device
    from millrace.run.device.precision import choose_precision

    settings = Config()
    try:
        device = open_device(settings.run)
        precision = choose_precision(settings.model, device, has_quantised_weights(files))
        shares = weight_formats(files, device.torch_device, precision.dtype, precision.quantization)
    except MillraceError as error:
        return str(error)
    return [
        {
            "format": share.label,
            "matrices": share.num_matrices,
            "bytes": share.num_bytes,
            "op": share.version.op,
            "version": share.version.name,
            "how": share.version.when,
        }
        for share in shares
    ]


def _format_lines(formats: list[dict[str, Any]] | str) -> Iterator[str]:
    if isinstance(formats, str):
        yield f"not served here: {formats}"
        return
    width = max(len(share["format"]) for share in formats)
    yield "formats of the matrices, their bytes, and what multiplies them here:"
    for share in formats:
        op = f"{share['op']} {share['version']}"
        yield f"  {share['format']:<{width}}  {share['matrices']:>5} × {share['bytes']:>15,}  {op}: {share['how']}"


def _catalogue_facts(text: str) -> dict[str, Any]:
    """From the catalogue, or else from the hub."""
    from millrace.sources.resolve import not_found

    name = parse_name(expand_alias(text), has_gpu=has_gpu())
    if name is None:
        raise not_found(text)
    entry = find_entry(text)
    if entry is None:
        from millrace.sources.hub import describe

        model = describe(name)
        return {
            "name": model.name,
            "downloaded": "no",
            "commit": model.commit,
            "files": len(model.files),
            "bytes": model.num_bytes,
        }
    facts: dict[str, Any] = {
        "name": entry.name,
        "downloaded": "no",
        "hub": str(name),
        "gated": "yes" if entry.gated else "no",
        "supported": "yes" if entry.is_supported else "not yet",
        "bytes": catalogue_bytes(entry.name),
        "family": entry.family,
        "parameters": round(entry.parameters * 1e9),
        "layers": entry.layers,
        "kv_heads": entry.kv_heads,
        "context": entry.context,
    }
    last = last_check()
    check = last.models.get(entry.name) if last is not None else None
    facts["checked"] = f"on {last.date} against {last.hub}" if last is not None and check is not None else "unchecked"
    if check is not None:
        facts |= {"licence": check.licence or "unknown", "problems": "; ".join(check.problems) or "none"}
    return facts | ({"sampling": dict(entry.sampling)} if entry.sampling else {})
