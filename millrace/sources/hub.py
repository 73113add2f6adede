"""Downloads models from the Hugging Face hub with `huggingface_hub`: resumable, verified, found again without network.

A manifest per model lists its files with sizes. A model whose manifest is complete is used without asking the hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.config import cache_dir
from millrace.errors import ModelError
from millrace.sources.catalogue import find_entry
from millrace.sources.download import Progress
from millrace.sources.hf_config import SETTINGS_BESIDE
from millrace.sources.hf_files import DRAFTER_TORCH_FILES
from millrace.sources.names import HubName

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_WANTED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "*.jinja"),
    *("modules.json", "config_sentence_transformers.json", *SETTINGS_BESIDE),
)
ADAPTER = "adapter"
"""Variant of a repository's LoRA adapter, as PEFT saves it: `org/repo:adapter`."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_UNWANTED = ("consolidated*", "*/*")
"""Copies of the weights in other formats, and all subdirectories."""
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_CHUNK_BYTES = 1 << 22
SPARE_BYTES = 256 << 20
REACH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    num_bytes: int
    sha256: str = ""
    """Of files in LFS; empty for small files, whose hash git does not give in this form."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """The files of one model at one commit. `folder` is where they are once downloaded."""

    name: str
    commit: str
    files: tuple[HubFile, ...]
    folder: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def weights(self) -> Path:
        """The first GGUF file, or the directory."""
        ggufs = sorted(file.name for file in self.files if file.name.endswith(".gguf"))
        return Path(self.folder) / ggufs[0] if ggufs else Path(self.folder)


def find_downloaded(name: HubName) -> HubModel | None:
    """The model if all its files are here in full."""
    try:
        record = json.loads(_manifest(name).read_text(encoding="utf-8"))
        model = HubModel(
            record["name"], record["commit"], tuple(HubFile(**f) for f in record["files"]), record["folder"]
        )
        sizes = [(Path(model.folder) / file.name).stat().st_size for file in model.files]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_asked_for = model.name == str(name)  # Two names can have the same manifest file.
    return model if is_asked_for and sizes == [file.num_bytes for file in model.files] else None


def downloaded_models() -> list[HubModel]:
    """Every model with a complete manifest, by name."""
    found = []
    for path in sorted(_manifest_dir().glob("*.json")):
        try:
            name = parse_manifest_name(json.loads(path.read_text(encoding="utf-8"))["name"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        model = find_downloaded(name)
        if model is not None:
            found.append(model)
    return found


def parse_manifest_name(text: str) -> HubName:
    head, _, variant = text.partition(":")
    repo, _, revision = head.partition("@")
    return HubName(repo, revision or "main", variant)


def describe(name: HubName, *, is_drafter: bool = False, of_any_family: bool = False) -> HubModel:
    """What the hub has under this name: the files that would be downloaded, and their sizes. A drafter may have torch
    files, which its loader reads as tensors only. Families that cannot be loaded are refused unless `of_any_family`."""
    entry = find_entry(name.repo)
    if entry is not None and not entry.is_supported and not of_any_family:
        raise ModelError(
            f"'{name}' is a model of the family {entry.family}, which is not supported yet; nothing was downloaded."
            " `millrace models` lists those that are."
        )

    info = model_info(name)
    siblings = list(info.siblings or ())
    if name.variant == ADAPTER:
        files = _choose_adapter(name, siblings)
    else:
        files = _choose_gguf(name, siblings) if name.variant else _choose_files(name, siblings, is_drafter)
    return HubModel(str(name), str(info.sha), tuple(_file(sibling) for sibling in files))


def model_info(name: HubName) -> ModelInfo:
    """The hub's description of a repository, with the sizes of its files."""
    import huggingface_hub

    try:
        return huggingface_hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=30)
    except Exception as error:  # huggingface_hub passes on any exception of its HTTP client.
        raise _failure(name, error) from error


def why_unreachable(timeout_s: float = REACH_TIMEOUT_S) -> str:
    """Why the hub does not answer; empty if it does. Waits no longer than `timeout_s`, also for a name server."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=timeout_s):
                answers.put("")
        except urllib.error.HTTPError:
            answers.put("")  # It answers.
        except (OSError, ValueError) as error:
            answers.put(str(getattr(error, "reason", error)))

    threading.Thread(target=ask, name="hub-probe", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"


def hub_address() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def fetch(
    name: HubName, progress: Progress | None = None, *, is_drafter: bool = False, max_bytes: int | None = None
) -> HubModel:
    """Download what is missing, verify it, and write the manifest. An interrupted download is resumed. More than
    `max_bytes` are refused before anything is downloaded."""
    model = describe(name, is_drafter=is_drafter)
    if max_bytes is not None and model.num_bytes > max_bytes:
        raise ModelError(f"'{name}' has {model.num_bytes:,} bytes on the hub; at most {max_bytes:,} are downloaded.")
    report = progress or _silent
    _check_space(model)
    done, folder = 0, ""
    for file in model.files:
        path = _fetch_file(name, model, file, done, report)
        folder = str(path)[: -len(file.name)].rstrip("/")
        done += file.num_bytes
    complete = HubModel(model.name, model.commit, model.files, folder)
    path = _manifest(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(asdict(complete)), encoding="utf-8")
    os.replace(partial, path)
    return complete


def remove(model: HubModel) -> int:
    """Delete a downloaded model. Returns the number of bytes that became free. Files that another model uses stay."""
    others = {
        Path(other.folder) / file.name
        for other in downloaded_models()
        if other.name != model.name
        for file in other.files
    }
    blobs = {os.path.realpath(path) for path in others}
    freed = 0
    for file in model.files:
        path = Path(model.folder) / file.name
        blob = os.path.realpath(path)
        if path not in others:
            path.unlink(missing_ok=True)
        if blob not in blobs and os.path.exists(blob):
            freed += os.path.getsize(blob)
            os.unlink(blob)
    _manifest(parse_manifest_name(model.name)).unlink(missing_ok=True)
    return freed


# --- choosing files ---


def _choose_files(name: HubName, siblings: list[RepoSibling], is_drafter: bool) -> list[RepoSibling]:
    chosen = [s for s in siblings if _matches(s.rfilename, _WANTED) and not _matches(s.rfilename, _UNWANTED)]
    has_safetensors = any(s.rfilename.endswith(".safetensors") for s in chosen)
    torch_files = [s for s in siblings if s.rfilename in DRAFTER_TORCH_FILES]
    if is_drafter and torch_files and not has_safetensors:
        return chosen + torch_files
    if not has_safetensors:
        quantisations = sorted({_quantisation(s.rfilename) for s in siblings if s.rfilename.endswith(".gguf")})
        if quantisations:
            raise ModelError(
                f"'{name.repo}' on the hub has GGUF files only. Name one: {name.repo}:{quantisations[0]}"
                f" (it has {', '.join(quantisations)})."
            )
        raise ModelError(
            f"'{name.repo}' on the hub has no safetensors or GGUF files. Pickled weights are refused because loading"
            " them can run arbitrary code."
        )
    return chosen


def _choose_adapter(name: HubName, siblings: list[RepoSibling]) -> list[RepoSibling]:
    found = [s for s in siblings if s.rfilename in _ADAPTER_FILES]
    if len(found) < len(_ADAPTER_FILES):
        missing = ", ".join(sorted({*_ADAPTER_FILES} - {s.rfilename for s in found}))
        raise ModelError(
            f"'{name.repo}' on the hub is no adapter as PEFT saves it: it has no {missing}. Pickles are refused."
        )
    return found


def _choose_gguf(name: HubName, siblings: list[RepoSibling]) -> list[RepoSibling]:
    """The file with this name or quantisation, with all its parts."""
    ggufs = [s for s in siblings if s.rfilename.endswith(".gguf") and "mmproj" not in s.rfilename.lower()]
    exact = [s for s in ggufs if s.rfilename == name.variant]
    wanted = name.variant.lower()
    found = exact or [s for s in ggufs if _quantisation(s.rfilename).lower() == wanted]
    if not found:
        names = ", ".join(sorted({_quantisation(s.rfilename) for s in ggufs})) or "no GGUF files"
        raise ModelError(f"'{name.repo}' on the hub has no GGUF file for ':{name.variant}'. It has {names}.")
    stems = {_PART.sub(r"-of-\1.gguf", s.rfilename) for s in found}
    if len(stems) > 1:
        listed = ", ".join(sorted(stems))
        raise ModelError(f"':{name.variant}' fits several files of '{name.repo}': {listed}. Name the file.")
    return [s for s in ggufs if _PART.sub(r"-of-\1.gguf", s.rfilename) in stems]


def _quantisation(file: str) -> str:
    """`Q4_K_M` of `Qwen3-8B-Q4_K_M-00001-of-00002.gguf`; the whole stem if there is none."""
    stem = _PART.sub("", file.rpartition("/")[2]).removesuffix(".gguf")
    found = re.search(r"(?:^|[-._])((?:UD-)?i?q\d\w*|bf16|f16|f32|mxfp4)$", stem, flags=re.IGNORECASE)
    return found[1].upper() if found else stem


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _file(sibling: RepoSibling) -> HubFile:
    lfs: Any = sibling.lfs
    sha256 = "" if lfs is None else str(lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256)
    return HubFile(sibling.rfilename, int(sibling.size or 0), sha256)


# --- transfer ---


def _fetch_file(name: HubName, model: HubModel, file: HubFile, before: int, report: Progress) -> Path:
    import huggingface_hub
    from tqdm.auto import tqdm

    what, received = f"downloading {name}", 0

    class Reporter(tqdm):  # type: ignore[misc]
        """Passes the bytes of this file on to `report`. huggingface_hub counts resumed bytes too."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self._add(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self._add(int(n or 0))
            return None

        def _add(self, n: int) -> None:
            nonlocal received
            received = min(received + n, file.num_bytes)
            report(what, before + received, model.num_bytes)

    report(what, before, model.num_bytes)
    try:
        path = Path(huggingface_hub.hf_hub_download(name.repo, file.name, revision=model.commit, tqdm_class=Reporter))
    except Exception as error:
        raise _failure(name, error) from error
    problem = _problem(path, file, lambda done: report(f"verifying {name}", before + done, model.num_bytes))
    if problem:
        blob = os.path.realpath(path)
        path.unlink(missing_ok=True)
        Path(blob).unlink(missing_ok=True)
        raise ModelError(f"{file.name} of '{name}' arrived damaged: {problem}. It was deleted; run again.")
    report(what, before + file.num_bytes, model.num_bytes)
    return path


def _problem(path: Path, file: HubFile, on_bytes: Callable[[int], None]) -> str:
    """What is wrong with a downloaded file; empty if it is as the hub says."""
    size = path.stat().st_size
    if size != file.num_bytes:
        return f"it has {size:,} bytes instead of {file.num_bytes:,}"
    if not file.sha256:
        return ""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done)
    if digest.hexdigest() != file.sha256:
        return f"its SHA-256 is {digest.hexdigest()} instead of {file.sha256}"
    return ""


def _check_space(model: HubModel) -> None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < model.num_bytes + SPARE_BYTES:
        raise ModelError(
            f"{model.name} needs {model.num_bytes / 1e9:.1f} GB in {folder}, but only {free / 1e9:.1f} GB are free."
            " Free space (millrace rm), set HF_HOME to a larger disk, or choose a smaller quantisation."
        )


def _failure(name: HubName, error: Exception) -> ModelError:
    from huggingface_hub import errors

    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    code = "not_found"
    if isinstance(error, errors.GatedRepoError):
        code = "gated"
        advice = "The model is gated: accept its licence on its page, then log in with `hf auth login` or set HF_TOKEN."
    elif isinstance(error, errors.RevisionNotFoundError):
        advice = f"The hub has no revision '{name.revision}' of it."
    elif isinstance(error, errors.RepositoryNotFoundError):
        advice = "The hub has no such model, or it is private: check the name, or log in with `hf auth login`."
    elif isinstance(error, errors.OfflineModeIsEnabled):
        code, advice = "unreachable", "HF_HUB_OFFLINE is set; unset it to download."
    else:
        code = "unreachable"
        advice = f"({type(error).__name__}: {reason[:300]}) Check the network and run again; what has arrived is kept."
    return ModelError(f"'{name}' could not be downloaded from the hub. {advice}", code=code)


def _manifest_dir() -> Path:
    return cache_dir() / "hub"


def _manifest(name: HubName) -> Path:
    return _manifest_dir() / (re.sub(r"[^\w.@-]+", "--", str(name)) + ".json")


def _silent(what: str, done: int, total: int) -> None:
    """Progress callback that does nothing."""
