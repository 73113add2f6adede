"""Finds the weight files of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from millrace.errors import ModelError
from millrace.sources.hf_config import read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ONNX = "model.onnx"
DRAFTER_TORCH_FILES = ("medusa_lm_head.pt", "pytorch_model.bin")
"""Files of drafters that are read as named tensors, if there is no safetensors file."""
_PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_weights(folder: Path) -> tuple[Path, ...]:
    """The directory's safetensors files: those in its index, else the only file, else none."""
    if (folder / INDEX).is_file():
        return _shards(folder, weight_map(folder))
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) <= 1:
        return tuple(others)
    listed = ", ".join(path.name for path in others[:4])
    raise ModelError(f"{folder} has several safetensors files ({listed}) but no {INDEX}; download that file too.")


def find_onnx(folder: Path) -> Path | None:
    """The ONNX file of a directory: the unquantised one if there is one, also in the folder `onnx`."""
    for place in (folder, folder / "onnx"):
        if (place / ONNX).is_file():
            return place / ONNX
    found = sorted([*folder.glob("*.onnx"), *(folder / "onnx").glob("*.onnx")])
    if len(found) > 1:
        listed = ", ".join(path.name for path in found[:4])
        raise ModelError(f"{folder} has several ONNX files ({listed}); give the path of one of them.")
    return found[0] if found else None


def weight_map(folder: Path) -> dict[str, str]:
    """File name of each tensor, from the index."""
    path = folder / INDEX
    found = read_json_object(path).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ModelError(f"{path} has no valid weight_map. Download it again.")
    return found


def _shards(folder: Path, names: dict[str, str]) -> tuple[Path, ...]:
    paths = []
    for name in sorted(set(names.values())):
        if Path(name).name != name:
            raise ModelError(
                f"{folder / INDEX} names the file '{name}', which is outside its directory. Download it again."
            )
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no file {name}, which {INDEX} names. Download it.")
        paths.append(folder / name)
    if not paths:
        raise ModelError(f"{folder / INDEX} names no files. Download it again.")
    return tuple(paths)


def has_pickled_weights(folder: Path) -> bool:
    return any(True for pattern in _PICKLED_PATTERNS for _ in folder.glob(pattern))
