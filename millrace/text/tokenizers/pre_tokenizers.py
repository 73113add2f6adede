"""Pre-tokenizers of byte-level vocabularies, by their names in GGUF files.

Merges were learned on text split by one exact rule, and a similar rule gives other ids. An unknown name is therefore an
error, never approximated.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from millrace.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(suffix: str) -> str:
    """Words, split where lower case is followed by upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"


_SYMBOLS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_TEKKEN = _cased_words("") + r"|\p{N}|" + _SYMBOLS_AND_SLASH + _TAIL
_GPT4O = _cased_words(_CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _SYMBOLS_AND_SLASH + _TAIL

_DEEPSEEK_LETTERS = (
    "["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One pre-tokenizer: normalisation, splits, and two properties of its vocabularies."""

    splits: tuple[str, ...]
    """Regular expressions, applied in order to the pieces of the one before; matches and gaps both become pieces."""
    digits: bool = False
    """Each digit is split off before `splits` are applied."""
    nfc: bool = False
    """The text is normalised to Unicode NFC first."""
    whole_words: bool = False
    """A piece that is in the vocabulary becomes one token without applying merges."""
    adds_bos: bool = False
    """BOS is added before a text unless the file says otherwise."""

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self, *, space_first: bool) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        if space_first and self == GPT2:
            return pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


GPT2 = Recipe((_GPT2,))
_LLAMA3_RECIPE = Recipe((_LLAMA3,), whole_words=True, adds_bos=True)
_DIGITS_GPT2 = Recipe((_GPT2,), digits=True)

RECIPES: dict[str, Recipe] = {
    "default": Recipe((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": Recipe((_GPT2,), nfc=True),
    "olmo": Recipe((_GPT2,), nfc=True),
    "llama-bpe": _LLAMA3_RECIPE,
    "llama3": _LLAMA3_RECIPE,
    "llama-v3": _LLAMA3_RECIPE,
    "smaug-bpe": Recipe((_LLAMA3,)),
    "dbrx": Recipe((_LLAMA3,)),
    "glm4": Recipe((_LLAMA3,)),
    "chatglm-bpe": Recipe((_LLAMA3,)),
    "qwen2": Recipe((_QWEN2,), nfc=True),
    "qwen35": Recipe((_QWEN35,), nfc=True),
    "deepseek-r1-qwen": Recipe((_QWEN2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": Recipe((_GPT2,), digits=True, nfc=True),
    "tekken": Recipe((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": Recipe((_GPT4O,)),
    "llama4": Recipe((_GPT4O,)),
    "deepseek-llm": Recipe(
        (
            r"[\r\n]",
            r"\s?" + _DEEPSEEK_LETTERS + "+",
            r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": Recipe((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": Recipe((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS)),
}


def recipe_for(name: str, where: str) -> Recipe:
    """The rule for `name`, the value of `tokenizer.ggml.pre` in the file `where`."""
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ModelError(
            f"{where}: the pre-tokenizer '{name}' (tokenizer.ggml.pre) is not supported, and another one would give"
            f" wrong tokens. Supported: {', '.join(sorted(RECIPES))}. Serve the model from its Hugging Face directory"
            " (with tokenizer.json) instead."
        )
    return recipe
