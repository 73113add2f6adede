"""What rounding activations to INT8 costs: perplexity and greedy agreement against exact products of the same weights.

    python tools/int8_quality.py [MODEL]

Prints, over the fixed text of `millrace bench`, the perplexity with exact float32 products and with `--quantization
int8`, and how often both would draw the same greedy token after the same tokens. Then it continues some windows
greedily with exact products and counts on how many of those tokens INT8 products agree.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.paged import PagedDriver

from millrace.bench.http.perplexity import TEXT_FILE, cut
from millrace.config import DEFAULT_MODEL
from millrace.models.decoder import Decoder
from millrace.models.load import load_decoder
from millrace.sources.resolve import resolve_model
from millrace.text.tokenizers.load import load_tokenizer

WINDOW, CONTINUED, PROMPT, NEW_TOKENS = 512, 6, 128, 64


def logits_of(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    return PagedDriver(decoder, block_size=16, num_blocks=-(-len(ids) // 16) + 2).step([(0, ids)])[0]


def continued(decoder: Decoder, ids: list[int]) -> list[int]:
    """The ids with NEW_TOKENS greedy ones after them."""
    driver = PagedDriver(decoder, block_size=16, num_blocks=-(-(len(ids) + NEW_TOKENS) // 16) + 2)
    found, new = list(ids), ids
    for _ in range(NEW_TOKENS):
        new = [int(driver.step([(0, new)])[0][-1].argmax())]
        found += new
    return found


def main() -> None:
    files = resolve_model(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL)
    cpu = torch.device("cpu")
    exact = load_decoder(files, device=cpu, dtype=torch.float32)
    rounded = load_decoder(files, device=cpu, dtype=torch.float32, quantization="int8")
    windows = cut(load_tokenizer(files).encode(TEXT_FILE.read_text(encoding="utf-8")), WINDOW)
    losses, agreed, scored = [0.0, 0.0], 0, 0
    for ids in windows:
        both = [logits_of(decoder, ids)[:-1] for decoder in (exact, rounded)]
        targets = torch.tensor(ids[1:])
        for place, logits in enumerate(both):
            losses[place] += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        agreed += int((both[0].argmax(1) == both[1].argmax(1)).sum())
        scored += len(targets)
    plain, int8 = (float(torch.tensor(loss / scored).exp()) for loss in losses)
    print(f"perplexity of {scored} tokens: exact {plain:.3f}, INT8 {int8:.3f} ({100 * (int8 / plain - 1):+.2f}%)")
    print(f"the same most likely token: {100 * agreed / scored:.2f}%")
    same, equal = 0, 0
    for ids in windows[:CONTINUED]:
        whole = continued(exact, ids[:PROMPT])
        drawn = logits_of(rounded, whole)[PROMPT - 1 : -1].argmax(1)
        hits = int((drawn == torch.tensor(whole[PROMPT:])).sum())
        same, equal = same + hits, equal + (hits == NEW_TOKENS)
    total = CONTINUED * NEW_TOKENS
    print(f"greedy continuations: {same} of {total} tokens agree, {equal} of {CONTINUED} are equal as a whole")


if __name__ == "__main__":
    main()
