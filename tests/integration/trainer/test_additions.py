"""Check that a new algorithm is a file and a line, and a component of the reward a function and a
line of YAML.

The files and lines are those of CONTRIBUTING.md, added to a copy of the tree, which then trains.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.kits.trainer.rewards import reward_services
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy

ROOT = Path(__file__).parents[3]


def section_of(title: str) -> str:
    """Return a section of CONTRIBUTING.md."""
    pages = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## ")
    (text,) = [page for page in pages if page.startswith(title + "\n")]
    return text


def add_component(tree: Path) -> None:
    """Write the two files of the section about a component of the reward."""
    text = section_of("A component of the reward")
    (code,) = re.findall(r"`brevity\.py`.*?```python\n(.*?)```", text, re.DOTALL)
    (line,) = re.findall(r"`reward\.yaml`:\n\n```yaml\n(.*?)```", text, re.DOTALL)
    (tree / "brevity.py").write_text(code, encoding="utf-8")
    (tree / "reward.yaml").write_text(line, encoding="utf-8")


def add(tree: Path, section: str) -> None:
    """Do what a section of CONTRIBUTING.md says: write its file, and add its line."""
    text = section_of(section)
    (path,) = re.findall(r"^`(trainer/[\w/]+\.py)`;", text, re.MULTILINE)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ((line, registry),) = re.findall(r"the line `(.+?)` to `_CLASSES` in `(.+?)`", text)
    (tree / path).write_text(f'"""A file of a contributor."""\n\n{code}', encoding="utf-8")
    before = (tree / registry).read_text(encoding="utf-8")
    after = before.replace("_CLASSES = (\n", f"_CLASSES = (\n    {line}\n")
    assert len(after.splitlines()) == len(before.splitlines()) + 1
    (tree / registry).write_text(after, encoding="utf-8")


def test_an_algorithm_and_a_component_of_the_reward_are_added_as_contributing_says(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "tree"
    for package in ("scorekit", "trainer"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tree / package, ignore=ignored)
    add(tree, "An algorithm")
    add_component(tree)
    policy = save_policy(tmp_path / "policy", byte_level_tokenizer())
    row = {"tgt_lang": "Korean", "src_lang": "English", "ref_text": "저장"}
    row |= {"src_lang_code": "en", "tgt_lang_code": "ko"}
    rows = [row | {"id": str(n), "src_text": f"Save {n}."} for n in range(2)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = tmp_path / "run"
    settings = {
        "data": {"train": str(data)},
        "policy": {"path": str(policy)},
        "generation": {"prompt_template": "source", "max_new_tokens": 4},
        "rl": {"algorithm": "ratio_free", "num_updates": 1, "batch_size": 2},
        "misc": {"device": "cpu", "threads": 1, "run_dir": str(run_dir)},
    }
    with reward_services() as running:
        terms = {"w_xcomet_span": 0, "definition": "reward.yaml"}
        config = tmp_path / "run.yaml"
        config.write_text(json.dumps(settings | {"reward": {**running.urls, **terms}}))
        command = [sys.executable, "-m", "trainer", "train", "--config", str(config)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(text) for text in (run_dir / "log.jsonl").read_text().splitlines()]
    assert line["moved"] > 0 and line["policy_loss"] > 0 and line["grad_norm"] > 0
    dump = (run_dir / "completions").glob("train-*.jsonl")
    stats = [json.loads(text)["definition_stats"] for path in dump for text in path.open()]
    values = [values["component/brevity"] for values in stats]
    assert values and line["definition_component_brevity_mean"] == sum(values) / len(values)
    assert "ratio_free" in (run_dir / "config.yaml").read_text()
