"""Check what follows from the table of curation steps, and that a new step is a file and a line.

The file and the line are those of CONTRIBUTING.md, added to a copy of the tree.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.trainer.searching.curated import make_question, searched, write_run
from trainer.search.steps.table import IN_ROUND, STEPS, recording, step

ROOT = Path(__file__).parents[5]


@pytest.mark.parametrize("name", STEPS)
def test_the_table_says_what_the_step_says(name: str) -> None:
    curation_step = step(name)
    assert curation_step.name == name
    assert (type(curation_step).__doc__ or "").partition("\n")[0] == STEPS[name].help
    assert {"out", "config", "set_", "overwrite"} <= set(curation_step.options)
    assert set(curation_step.further) <= set(curation_step.options)
    assert ("estimate" in curation_step.options) == bool(curation_step.asks)
    assert set(curation_step.also) <= {"answering", "retriever", *STEPS}
    if (needed := curation_step.needs) is not None:
        assert IN_ROUND.index(needed) < IN_ROUND.index(name)


def test_the_order_of_a_round_is_that_of_the_requirements() -> None:
    assert (
        *("alternatives", "diagnose", "hallucinations", "buckets", "verify", "focus", "budget"),
        *("distill", "rewrite"),
    ) == IN_ROUND
    assert recording() == ["diagnose", "hallucinations", "verify"]


def test_the_help_of_search_imports_no_step() -> None:
    code = (
        "import sys; from trainer.search.cli import app; from typer.testing import CliRunner;"
        "result = CliRunner().invoke(app, ['--help']); assert result.exit_code == 0;"
        "print(sorted(m for m in sys.modules if m.startswith('trainer.search.steps.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    names = [f"trainer.search.steps.{name}" for name in ("commands", "options", "table")]
    assert done.stdout.strip() == str(names), done.stderr


def test_a_step_that_needs_no_model_imports_no_torch() -> None:
    code = "import sys, trainer.search.steps.engine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def add_toy_step(tree: Path) -> None:
    """Do what the section of CONTRIBUTING.md says: write its file, and add its line."""
    pages = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## ")
    (text,) = [page for page in pages if page.startswith("A step of curation\n")]
    (path,) = re.findall(r"^`(trainer/[\w/]+\.py)`;", text, re.MULTILINE)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ((registry, line),) = re.findall(r"to `STEPS` in `(.+?)`:\n`(.+?)`\n", text)
    (tree / path).write_text(f'"""A file of a contributor."""\n\n{code}', encoding="utf-8")
    before = (tree / registry).read_text(encoding="utf-8")
    opening = "STEPS: Final[dict[str, StepRow]] = {\n"
    after = before.replace(opening, f"{opening}    {line}\n")
    assert len(after.splitlines()) == len(before.splitlines()) + 1
    (tree / registry).write_text(after, encoding="utf-8")


def test_a_file_and_a_line_add_a_step(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for package in ("scorekit", "trainer"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tree / package, ignore=ignored)
    add_toy_step(tree)
    questions = [make_question(f"q{number}", 1) for number in range(3)]
    played = [
        searched(question, reward=0.0, shown=("deck_1",) * (number + 1))
        for number, question in enumerate(questions[:2])
    ]
    run = write_run(tmp_path / "run", played, questions)

    def started(*words: object) -> str:
        command = [sys.executable, "-m", "trainer", "search", *map(str, words)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Keep questions whose episodes" in started("--help")
    out = tmp_path / "out"
    printed = started("short", "--run", run, "--out", out, "--set", "short.most=1")
    assert "kept: 1 of 3 rows" in printed
    assert read(out / "manifest.json")["settings"] == {"most": 1}
    assert "At most 1 of each episode." in (out / "report.html").read_text(encoding="utf-8")
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from trainer.search.rounds.loop import _curate\n"
        "from trainer.search.rounds.config import RoundConfig, RoundLimits\n"
        "from trainer.search.rounds.plan import LoopState\n"
        "from trainer.search.rounds.steps import Steps, lock_loop\n"
        "from trainer.search.steps.config import CurationConfig\n"
        "from trainer.search.steps.table import step\n"
        "run, out = map(Path, sys.argv[1:])\n"
        "assert RoundConfig(name='a', then=['distill', 'short']).then == ['short', 'distill']\n"
        "state = LoopState({}, 'policy', runs=[run])\n"
        "with lock_loop(out) as lock:\n"
        "    steps = Steps(out / '01-a', RoundLimits(), [], lock)\n"
        "    _curate(step('short'), CurationConfig(), state, steps)\n"
        "print(state.rows)\n"
    )
    words = [sys.executable, "-c", code, str(run), str(tmp_path / "loop")]
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = tmp_path / "loop/01-a/short/rows.jsonl"
    assert done.stdout.splitlines()[-1] == str(rows)
    assert [json.loads(line)["id"] for line in rows.open()] == ["q0"]
    settings = read(tmp_path / "loop/01-a/steps.json")["short"]["settings"]
    assert settings["short.most"] == 1 and settings["read"][0] == "--run"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
