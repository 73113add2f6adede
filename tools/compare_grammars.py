"""Compares llguidance, as Millrace uses it, with xgrammar on a folder of schemas with instances.

    python tools/compare_grammars.py FOLDER --tokenizer smollm2-135m-instruct

Each file holds {"schema": …, "tests": [{"data": …, "valid": true}, …]}. xgrammar is measured if it can be imported; it
is not a dependency of Millrace. Both are told to write `, ` and `: `, and instances have the schema's order of
properties where that is possible.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from millrace.params.grammar import Grammar
from millrace.sources.resolve import resolve_model
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer


class Follower(Protocol):
    def fill(self) -> None: ...
    def accept(self, token: int) -> bool: ...
    def may_end(self) -> bool: ...


@dataclass
class Figures:
    compiled: int = 0
    refused: int = 0
    good_accepted: int = 0
    good_rejected: int = 0
    bad_accepted: int = 0
    bad_rejected: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class _Llguidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._environment = GrammarEnvironment(tokenizer, tokenizer.vocab_size)
        self._row = np.empty(self._environment.num_words, np.uint32)

    def compile(self, schema: str) -> Callable[[], Follower]:
        compiled = self._environment.compile(Grammar("json_schema", schema))
        row = self._row

        class One:
            def __init__(self) -> None:
                self._matcher = compiled.matcher()

            def fill(self) -> None:
                self._matcher.fill_mask(row)

            def accept(self, token: int) -> bool:
                try:
                    self._matcher.consume([token])
                except GrammarError:
                    return False
                return True

            def may_end(self) -> bool:
                return self._matcher.may_end

        return One


class _Xgrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._module = xgrammar
        words = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(
            words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=list(tokenizer.end_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._row = xgrammar.allocate_token_bitmask(1, len(words))

    def compile(self, schema: str) -> Callable[[], Follower]:
        module, row = self._module, self._row
        try:
            compiled = self._compiler.compile_json_schema(
                schema, any_whitespace=False, separators=(", ", ": "), strict_mode=False
            )
        except Exception as error:  # Whatever the library raises means that it refuses the schema.
            raise GrammarError(str(error)) from None

        class One:
            def __init__(self) -> None:
                self._matcher = module.GrammarMatcher(compiled)

            def fill(self) -> None:
                self._matcher.fill_next_token_bitmask(row)

            def accept(self, token: int) -> bool:
                return bool(self._matcher.accept_token(token))

            def may_end(self) -> bool:
                return bool(self._matcher.is_completed())

        return One


def _ordered(value: Any, schema: Any) -> Any:
    """The value with its properties in the order of the schema: an answer has them in that order."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [_ordered(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    named = schema.get("properties") if isinstance(schema, dict) else None
    named = named if isinstance(named, dict) else {}
    order = {name: place for place, name in enumerate(named)}
    names = sorted(value, key=lambda name: order.get(name, len(order)))
    return {name: _ordered(value[name], named.get(name)) for name in names}


def measure(make: Callable[[Tokenizer], Any], tokenizer: Tokenizer, files: list[Path]) -> Figures:
    engine, figures = make(tokenizer), Figures()
    for path in files:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        began = time.perf_counter()
        try:
            start = engine.compile(json.dumps(loaded["schema"]))
        except GrammarError:
            figures.refused += 1
            continue
        figures.compile_ms.append((time.perf_counter() - began) * 1e3)
        figures.compiled += 1
        for number, test in enumerate(loaded["tests"]):
            text = json.dumps(_ordered(test["data"], loaded["schema"]), ensure_ascii=False)
            accepted = _follow(start(), tokenizer.encode(text, add_special=False), figures)
            name = ("good" if test["valid"] else "bad") + ("_accepted" if accepted else "_rejected")
            setattr(figures, name, getattr(figures, name) + 1)
            if accepted != test["valid"]:
                figures.wrong.append(f"{path.name}#{number} {name}")
    return figures


def _follow(follower: Follower, tokens: list[int], figures: Figures) -> bool:
    for token in tokens:
        began = time.perf_counter()
        try:
            follower.fill()
        except GrammarError:
            return False
        figures.mask_us.append((time.perf_counter() - began) * 1e6)
        if not follower.accept(token):
            return False
    return follower.may_end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct")
    parser.add_argument("--wrong", action="store_true", help="name the instances that are judged wrongly")
    options = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(options.tokenizer))
    files = sorted(options.folder.glob("*.json"))
    for name, make in (("llguidance", _Llguidance), ("xgrammar", _Xgrammar)):
        try:
            found = measure(make, tokenizer, files)
        except ImportError:
            print(f"{name}: not installed")
            continue
        print(
            f"{name}: {found.compiled} schemas compiled, {found.refused} refused; instances: valid"
            f" {found.good_accepted} accepted, {found.good_rejected} rejected; invalid {found.bad_rejected} rejected,"
            f" {found.bad_accepted} accepted"
        )
        for what, values in (("compile ms", found.compile_ms), ("mask µs", found.mask_us)):
            p50, p99, top = np.percentile(values, [50, 99, 100])
            print(f"  {what}: p50 {p50:.1f}, p99 {p99:.1f}, max {top:.1f} (n = {len(values)})")
        if options.wrong:
            print(*(f"  {one}" for one in found.wrong), sep="\n")


if __name__ == "__main__":
    main()
