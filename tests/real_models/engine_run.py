"""Run as a program: the engine's answers to the same requests, alone and in one batch, in float32.

Reads {model, num_tokens, prompts} from the file named first and writes {alone, batched} to the file named second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from millrace import LLM
from millrace.params.sampling import SamplingParams


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    params = SamplingParams(temperature=0.0, max_tokens=request["num_tokens"], ignore_eos=True)
    with LLM(request["model"], dtype="float32", kv_tokens=8192, prefix_cache=False) as llm:
        alone = [llm.generate([prompt], params)[0].choices[0].token_ids for prompt in request["prompts"]]
        together = llm.generate(request["prompts"], params)
    batched = [generation.choices[0].token_ids for generation in together]
    Path(sys.argv[2]).write_text(json.dumps({"alone": alone, "batched": batched}))


if __name__ == "__main__":
    main()
