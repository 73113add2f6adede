"""Names that a reader meets often mean one class only."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1] / "millrace"
ONCE = {"StepCosts", "StepWork", "StepLog", "DraftedRows", "DraftStates", "HeadShape", "Admission"}
"""Beside the data types of a step."""


def classes(file: Path) -> list[str]:
    return re.findall(r"^ *class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_data_types_of_a_step_and_other_frequent_names_mean_one_class() -> None:
    found = defaultdict(list)
    for file in sorted(ROOT.rglob("*.py")):
        for name in classes(file):
            found[name].append(str(file.relative_to(ROOT)))
    own = {*classes(ROOT / "plan" / "step.py"), *ONCE}
    assert {name: files for name, files in found.items() if name in own and len(files) > 1} == {}
