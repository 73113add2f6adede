"""Beams of a tiny model equal those of transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny_files import write_tiny

from millrace import LLM, SamplingParams
from millrace.errors import BadRequest
from millrace.params.beams import BeamParams

PROMPTS = ([5, 17, 40, 2, 71], [60, 3, 3, 9, 28, 33, 80, 11])
KINDS = (
    (BeamParams(3), 6),
    (BeamParams(4, length_penalty=0.0, early_stopping=True), 6),
    (BeamParams(2, length_penalty=2.0, early_stopping="never"), 6),
)


def test_beams_equal_transformers(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m", "llama")
    lengths = set()
    with LLM(str(tmp_path / "m"), dtype="float32", kv_tokens=2048) as llm:
        # Further ends, so that beams end at different lengths.
        ends = [*llm.tokenizer.end_token_ids, *range(0, 90, 9)]
        for beams, num_tokens in KINDS:
            params = SamplingParams(
                n=beams.num_beams, max_tokens=num_tokens, stop_token_ids=tuple(ends[1:]), temperature=0, logprobs=0
            )
            found = llm.generate(list(PROMPTS), params, beams=beams)
            for prompt, generation in zip(PROMPTS, found, strict=True):
                ids = torch.tensor([prompt])
                theirs = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens,
                    num_beams=beams.num_beams, num_return_sequences=beams.num_beams, eos_token_id=ends,
                    pad_token_id=ends[0], length_penalty=beams.length_penalty, early_stopping=beams.early_stopping,
                )  # fmt: skip
                wanted = [_until_end(line[ids.shape[1] :].tolist(), ends) for line in theirs]
                assert [choice.token_ids for choice in generation.choices] == wanted, (prompt, beams)
                lengths.update(map(len, wanted))
        assert len(lengths) > 2
        with pytest.raises(BadRequest, match="top_p cannot be combined with beam search"):
            llm.generate("a", SamplingParams(top_p=0.5), beams=BeamParams(2))


def _until_end(tokens: list[int], ends: list[int]) -> list[int]:
    return tokens[: next((at for at, token in enumerate(tokens) if token in ends), len(tokens))]
