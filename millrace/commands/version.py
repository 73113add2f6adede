"""`millrace version`: versions for a bug report, read without importing the packages."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version

from millrace.version import __version__

USAGE = "millrace version [--json]"
EXAMPLES = "examples:\n  millrace version"
_PACKAGES = ("torch", "numpy", "aiohttp", "msgspec", "tokenizers", "gguf", "safetensors", "huggingface_hub")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    versions = {"millrace": __version__, "python": platform.python_version()}
    versions[platform.system().lower()] = f"{platform.release()} {platform.machine()}"
    versions |= {name: _version_of(name) for name in _PACKAGES}
    if args.json:
        print(json.dumps(versions))
        return 0
    for name, value in versions.items():
        print(f"{name} {value}")
    return 0


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
