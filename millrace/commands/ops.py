"""`millrace ops`: a table of every op with its versions, the one used on this machine, and why."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from millrace.errors import ConfigError
from millrace.terminal.folding import folded, terminal_width
from millrace.terminal.settings_options import add_settings, load_settings

if TYPE_CHECKING:
    import torch

    from millrace.ops.base.version import Shape, Version

USAGE = "millrace ops [options]"
EXAMPLES = """\
examples:
  millrace ops                       the versions used with default settings
  millrace ops --dtype float32       with another compute dtype
  millrace ops --deterministic       batch-invariant versions only"""

_MIN_WHY_WIDTH = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON line per version")
    add_settings(parser, sections=("model", "run"))


def run(args: argparse.Namespace) -> int:
    from millrace.run.device.device import open_device
    from millrace.run.device.precision import choose_precision

    config = load_settings(args).config
    device = open_device(config.run)
    precision = choose_precision(config.model, device, has_quantised_weights=True)
    choice = (device.torch_device, precision.dtype, config.run.deterministic, precision.quantization == "int8")
    if args.json:
        _print_json(*choice)
    else:
        print_ops(*choice)
        if config.run.tensor_parallel > 1:
            print(folded("With --tensor-parallel layers run op by op: the C++ step computes on one rank only."))
    return 0


def _print_json(device: torch.device, dtype: torch.dtype, deterministic: bool, int8: bool) -> None:
    op = ""
    for name, mark, version, invariant, why in _rows(device, dtype, deterministic, int8):
        op = name or op
        record = {"op": op, "version": version, "in_use": mark == "*", "batch_invariant": invariant == "yes"}
        print(json.dumps({**record, "why": why}))


def print_ops(device: torch.device, dtype: torch.dtype, deterministic: bool = False, int8: bool = False) -> None:
    """Print the table for a model of typical sizes. Compiles the CPU kernels if needed. `int8`: products of quantised
    weights round activations to INT8."""
    from millrace.ops.base.version import dtype_name

    width = terminal_width()
    mode = (", INT8 products of quantised weights" if int8 else "") + (", deterministic" if deterministic else "")
    print(folded(f"ops on {device.type} in {dtype_name(dtype)}{mode}; * marks the version in use\n"))
    for line in table_lines(device, dtype, deterministic, width, int8):
        print(line)
    if device.type == "cpu":
        from millrace.ops.cpp.native import int8_kernel, native_missing, native_origin

        print(f"C++ kernels: {native_origin()}")
        if int8 and not native_missing(device):
            print(f"INT8 products: {int8_kernel()}")
            print("KV cache: float16 unless --kv-dtype says otherwise")


def table_lines(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    width: int | None = None,
    int8: bool = False,
) -> Iterator[str]:
    rows = list(_rows(device, dtype, deterministic, int8))
    header = ("op", "", "version", "batch-invariant", "why")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(4)]
    why_width = None if width is None else max(width - sum(widths) - 8, _MIN_WHY_WIDTH)
    for row in (header, *rows):
        start = "  ".join(cell.ljust(size) for cell, size in zip(row[:4], widths, strict=True))
        folded = textwrap.wrap(row[4], why_width) if why_width else [row[4]]
        yield f"{start}  {folded[0]}"
        yield from (" " * (len(start) + 2) + rest for rest in folded[1:])


def _rows(
    device: torch.device, dtype: torch.dtype, deterministic: bool, int8: bool
) -> Iterator[tuple[str, str, str, str, str]]:
    from millrace.ops.registry import OPS, TYPICAL_SHAPE

    shape = {**TYPICAL_SHAPE, "int8": int8}
    for op, versions in OPS.items():
        chosen = _chosen(op, device, dtype, deterministic, shape)
        for index, version in enumerate(versions):
            reject_reason = version.reject_reason(device, dtype, deterministic, shape)
            invariant = "yes" if version.is_batch_invariant(device) else "no" if device.type in version.devices else ""
            why = f"unavailable: {reject_reason}" if reject_reason else version.when
            yield (op if index == 0 else "", "*" if version is chosen else " ", version.name, invariant, why)
        if chosen is None:
            yield ("", "!", "none", "", f"no version of {op} supports these settings")


def _chosen(op: str, device: torch.device, dtype: torch.dtype, deterministic: bool, shape: Shape) -> Version | None:
    from millrace.ops.registry import choose

    try:
        return choose(op, device, dtype, deterministic, **shape).version
    except ConfigError:
        return None
