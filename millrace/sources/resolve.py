"""Resolves a model source to local files. A source is a name, a directory, a GGUF file, a hub id or `random:…`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millrace.errors import ModelError
from millrace.sources.download import Progress, fetch_known
from millrace.sources.encoders.families import is_encoder
from millrace.sources.gguf.config import config_from_gguf
from millrace.sources.gguf.model import open_gguf_model
from millrace.sources.hf_config import read_config
from millrace.sources.hf_files import find_onnx, find_weights, has_pickled_weights
from millrace.sources.hub import fetch, find_downloaded
from millrace.sources.known_models import find_known
from millrace.sources.library import find_local, is_downloaded, known_folder, nearest_name
from millrace.sources.names import HubName, expand_alias, has_gpu, parse_name

__all__ = ["ModelFiles", "Progress", "resolve_model"]

RANDOM_PREFIX = "random:"
RANDOM_FORMAT = "weight_format"
"""Key of a config for random weights: the quantised format that they have."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class ModelFiles:
    """Files and config of a model. `config` has the form of a Hugging Face `config.json` for every kind of source."""

    name: str
    """Default model name in the API."""
    kind: Literal["gguf", "safetensors", "onnx", "random"]
    path: Path
    """The .gguf file, the directory, or the config file for random weights."""
    config: dict[str, Any]
    weights: tuple[Path, ...]
    """Files with tensors."""


def resolve_model(
    source: str, *, progress: Progress | None = None, offline: bool = False, allow_paths: bool = True
) -> ModelFiles:
    """Find the model. Known models and hub names are downloaded if they are not on this machine, unless `offline`.

    `allow_paths=False`: the source is a name and never a file, because a client of the server wrote it.
    """
    text = expand_alias(source.strip())
    if text.startswith(RANDOM_PREFIX):
        return _from_random(text.removeprefix(RANDOM_PREFIX))
    if offline and not (is_downloaded(text) if allow_paths else find_local(text)):
        raise ModelError(
            f"'{source}' is not on this machine, and --offline forbids downloads. `millrace ls` lists models."
        )
    known = find_known(text)
    if known is not None:
        weights = fetch_known(known, progress=progress)
        return _from_directory(known_folder(known), known.name) if known.weights else _from_gguf(weights, known.name)
    path = Path(text).expanduser()
    if allow_paths and text and path.exists():
        return _from_directory(path) if path.is_dir() else _from_file(path)
    name = parse_name(text, has_gpu=has_gpu())
    if name is not None:
        return _from_hub(name, text, progress)
    raise not_found(source)


def check_source(source: str) -> None:
    """Raise if this can be no model: neither a name, nor an existing file or directory, nor `random:…`."""
    text = expand_alias(source.strip())
    if text.startswith(RANDOM_PREFIX):
        _from_random(text.removeprefix(RANDOM_PREFIX))
    elif not Path(text).expanduser().exists():
        check_is_name(text)


def check_is_name(source: str) -> None:
    """Raise if this is neither a known model, nor an alias, nor a name of the form that the hub uses."""
    text = expand_alias(source.strip())
    if find_known(text) is None and parse_name(text, has_gpu=has_gpu()) is None:
        raise not_found(source)


def not_found(source: str) -> ModelError:
    if source.endswith(".gguf") or source.startswith(("/", "./", "../", "~")):
        return ModelError(f"There is no file or directory {source}. Check the path.")
    near = nearest_name(source)
    hint = f" Did you mean '{near}'?" if near else ""
    return ModelError(
        f"There is no model '{source}'.{hint} `millrace models` lists the names; or give a directory, a .gguf file,"
        " a hub name such as org/model, org/model@revision or org/model:Q4_K_M, or random:<config.json>."
    )


def _from_random(text: str) -> ModelFiles:
    path = Path(text).expanduser()
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ModelError(f"There is no config file {path} for random weights. Give the path as random:<config.json>.")
    own_name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return ModelFiles(f"random-{own_name}", "random", path, read_config(path), ())


def _from_gguf(path: Path, name: str) -> ModelFiles:
    model = open_gguf_model(path)
    return ModelFiles(name, "gguf", path, config_from_gguf(model), tuple(file.path for file in model.files))


def _from_file(path: Path) -> ModelFiles:
    if path.suffix == ".gguf":
        return _from_gguf(path, re.sub(r"-00001-of-\d{5}$", "", path.stem))
    if path.suffix == ".onnx":
        folder = path.parent if (path.parent / "config.json").is_file() else path.parent.parent
        return _from_onnx(folder, path, folder.resolve().name)
    if path.suffix in _PICKLED:
        raise ModelError(
            f"{path} is a pickled file, which is refused because loading it can run arbitrary code."
            " Convert the model to safetensors or GGUF."
        )
    if path.suffix in (".safetensors", ".json"):
        raise ModelError(f"{path} is one file of a model; give its directory {path.parent} instead.")
    raise ModelError(f"{path} is neither a .gguf or .onnx file nor a model directory. Give one of them.")


def _from_directory(path: Path, name: str = "") -> ModelFiles:
    name = name or path.resolve().name
    weights = find_weights(path)
    if weights:
        return ModelFiles(name, "safetensors", path, read_config(path / "config.json"), weights)
    ggufs = _gguf_choices(path)
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], name)
    if ggufs:
        listed = ", ".join(item.name for item in ggufs)
        raise ModelError(f"{path} contains {len(ggufs)} GGUF models ({listed}); give the path of one of them.")
    onnx = find_onnx(path)
    if onnx is not None:
        return _from_onnx(path, onnx, name)
    if has_pickled_weights(path):
        raise ModelError(
            f"{path} has only pickled weights, which are refused because loading them can run arbitrary code."
            " Convert the model to safetensors or GGUF."
        )
    raise ModelError(
        f"{path} has no .safetensors, .gguf or .onnx files, so it is not a model directory. Give another path."
    )


def _from_onnx(folder: Path, weights: Path, name: str) -> ModelFiles:
    config = read_config(folder / "config.json")
    if not is_encoder(config):
        raise ModelError(
            f"{weights} belongs to a {config.get('model_type')!r} model; only encoders are read from ONNX files."
            " Give the safetensors or GGUF files of this model."
        )
    return ModelFiles(name, "onnx", folder, config, (weights,))


def _gguf_choices(path: Path) -> list[Path]:
    """GGUF models in the directory: the first part of each split model, without vision projectors."""
    found = []
    for item in sorted(path.glob("*.gguf")):
        part = re.search(r"-(\d{5})-of-\d{5}$", item.stem)
        if not item.name.startswith("mmproj") and (part is None or int(part[1]) == 1):
            found.append(item)
    return found


def _from_hub(name: HubName, shown: str, progress: Progress | None) -> ModelFiles:
    model = find_downloaded(name) or fetch(name, progress)
    path = model.weights
    return _from_gguf(path, shown) if path.suffix == ".gguf" else _from_directory(path, shown)
