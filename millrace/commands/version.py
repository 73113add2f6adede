"""`millrace version`: versions for a bug report, read without importing the packages."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from millrace.version import __version__

USAGE = "millrace version"
EXAMPLES = "examples:\n  millrace version"
_PACKAGES = ("torch", "numpy", "aiohttp", "msgspec", "tokenizers", "gguf", "safetensors", "huggingface_hub")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    del args
    print(f"millrace {__version__}")
    print(f"python {platform.python_version()}")
    print(f"{platform.system().lower()} {platform.release()} {platform.machine()}")
    for name in _PACKAGES:
        print(f"{name} {_version_of(name)}")
    return 0


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
