"""What a training found: acceptance by place and workload, what that may gain, and the curves as a picture."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.load.svg import HEIGHT, WIDTH, Line, plot
from millrace.models.drafters.spec import DrafterSpec
from millrace.training.loop import Curves
from millrace.training.measure import Acceptance, overall


@dataclass(frozen=True, slots=True)
class TrainReport:
    spec: DrafterSpec
    target_name: str
    target_bytes: int
    """Bytes of weights that a step of the target reads."""
    step_bytes: int
    """Bytes that one step of the drafter reads, its LM head included; for Medusa of all heads."""
    file_bytes: int
    acceptance: Mapping[str, Acceptance]
    """On held-out prompts, by workload."""
    coverage: float
    """Share of the held-out answers' tokens that the drafter can propose."""
    num_answers: int
    num_tokens: int
    num_steps: int
    train_s: float
    curves: Curves = field(default_factory=Curves)

    def cost(self, num_drafts: int) -> float:
        """Bytes read for the drafts of a step, relative to the target's step."""
        count = 1 if self.spec.kind == "medusa" else num_drafts
        return count * self.step_bytes / self.target_bytes

    def gain(self, acceptance: Acceptance, num_drafts: int) -> float:
        """Estimated speed-up of one stream, if a step takes as long as its weights take to read and verifying drafts
        costs nothing."""
        return acceptance.tokens_per_step(num_drafts) / (1.0 + self.cost(num_drafts))

    def best_drafts(self, acceptance: Acceptance) -> int:
        return max(range(1, len(acceptance.rates) + 1), key=lambda count: self.gain(acceptance, count))

    def rows(self) -> list[list[str]]:
        """The table: workload, acceptance of each place, tokens per step, estimated gain."""
        found = []
        for name, own in {**self.acceptance, "all": overall(self.acceptance)}.items():
            best = self.best_drafts(own)
            rates = [f"{rate:.0%}" for rate in own.rates]
            found.append([name, *rates, f"{own.tokens_per_step(best):.2f}", str(best), f"{self.gain(own, best):.2f}"])
        return found

    def header(self) -> list[str]:
        places = [str(index + 1) for index in range(len(overall(self.acceptance).rates))]
        return ["workload", *places, "tokens per step", "drafts", "estimated gain"]


def curves_svg(curves: Curves, title: str) -> str:
    """Loss and acceptance over the training, one above the other."""
    losses = [Line("token loss", curves.steps, curves.losses)]
    if any(curves.features):
        losses.append(Line("feature loss", curves.steps, curves.features))
    places = zip(*curves.acceptance, strict=True)
    rates = [Line(f"place {index + 1}", curves.measured_at, list(ys)) for index, ys in enumerate(places)]
    upper = plot(f"{title}: loss", losses, "step", "nats")
    lower = plot("acceptance of each drafted place, held-out prompts", rates, "step", "share accepted")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{2 * HEIGHT}"'
        f' viewBox="0 0 {WIDTH} {2 * HEIGHT}"><title>{html.escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="white"/>{upper}'
        f'<g transform="translate(0 {HEIGHT})">{lower}</g></svg>\n'
    )


def model_card(report: TrainReport, command: str) -> str:
    """README.md of the drafter's directory."""
    spec = report.spec
    header = report.header()
    table = [header, ["---"] * len(header), *report.rows()]
    lines = "\n".join("| " + " | ".join(row) + " |" for row in table)
    vocabulary = (
        f"It proposes {spec.draft_vocab_size:,} of the target's {spec.vocab_size:,} tokens, which are"
        f" {report.coverage:.1%} of what the target wrote on held-out prompts."
        if spec.has_token_map
        else f"It proposes any of the target's {spec.vocab_size:,} tokens."
    )
    return f"""# A drafter for {report.target_name}

An {spec.kind} drafter for speculative decoding: it guesses the next tokens, the target verifies them, and the output is
the target's own. It is of no use without the target, {report.target_name}.

```
millrace serve {report.target_name} --speculate {spec.kind} --drafter THIS_DIRECTORY
```

Trained with

```
{command}
```

on {report.num_answers:,} answers ({report.num_tokens:,} tokens) that the target wrote itself, in {report.num_steps:,}
steps and {report.train_s:.0f} s. {vocabulary} The file has {report.file_bytes / 1e6:.1f} MB.

## Acceptance

Share of drafts accepted at each place, among those whose predecessors were accepted; greedy answers to held-out
prompts. The estimated gain is that of one stream, if a step takes as long as its weights take to read: a step of the
drafter reads {report.cost(1):.1%} of what a step of the target reads. Measure the real one with
`millrace bench speculate`.

{lines}

![loss and acceptance](curves.svg)
"""
