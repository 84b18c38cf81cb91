"""One name means one thing, wherever it stands."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Sections of the two configs, which users know by these names; a task adds to the run's `misc`.
SECTIONS = {
    "DataConfig",
    "EvalConfig",
    "GenerationConfig",
    "MiscConfig",
    "RewardConfig",
    "RunConfig",
}


def test_no_two_classes_have_one_name() -> None:
    files_by_class: dict[str, list[str]] = defaultdict(list)
    for package in ("scorekit", "services", "trainer", "synth"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.M):
                files_by_class[name].append(str(path.relative_to(ROOT)))
    assert {
        name: files for name, files in files_by_class.items() if len(files) > 1
    }.keys() == SECTIONS
