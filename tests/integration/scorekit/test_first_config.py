"""Check `scorekit init`: with its three keys changed, a config passes its check, and runs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.first_config import CHANGE, TASKS
from scorekit.server.fake import FakeBackend
from testing.openai_server import FakeOpenAI
from testing.servers import running_app, running_service
from tests.kits import forked
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.synth.driver import korean
from tests.kits.trainer.roleplay import ngram_server, turn, write_policy, write_turns
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy
from tests.kits.trainer.searching.policies import TINY_SIGHT, save_tiny

RUNNER = CliRunner()


def config_of(task: str, folder: Path, **values: str) -> Path:
    """Write the config of a task, and change its marked keys."""
    path = folder / "my.yaml"
    assert RUNNER.invoke(app, ["init", task, str(path)]).exit_code == 0
    text = path.read_text(encoding="utf-8")
    for key, value in values.items():
        text, count = re.subn(rf"({key}:) .*{CHANGE}.*", rf"\1 {value}", text)
        assert count == 1, key
    assert CHANGE not in text, "no further line has to change"
    path.write_text(text, encoding="utf-8")
    return path


def ran(folder: Path, module: str, *words: str, **settings: object) -> str:
    """Run a command that must succeed; return its stdout.

    settings: a__b=1 is --set a.b=1.
    """
    sets = [
        part
        for key, value in settings.items()
        for part in ("--set", f"{key.replace('__', '.')}={json.dumps(value)}")
    ]
    done = forked.run(
        [sys.executable, "-m", module, *words, "--config", "my.yaml", *sets],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_translation_runs_on_rows_of_one_column(tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", byte_level_tokenizer())
    (tmp_path / "rows.csv").write_text("src_text\nOpen it.\nSave it.\nClose it.\nStop.\n")
    with running_service(FakeBackend("metricx")) as url:
        config_of("translation", tmp_path, train="rows.csv", path="policy", metricx_urls=url)
        small = {"generation__max_new_tokens": 8, "generation__prompt_template": "source"}
        small |= {"rl__batch_size": 2, "rl__num_updates": 2}
        assert "4 rows (en-US>ko-KR 4)" in ran(tmp_path, "trainer", "check", **small)
        ran(tmp_path, "trainer", "train", **small)
    assert (tmp_path / "runs/translation/log.jsonl").read_bytes().count(b"\n") == 2


def test_roleplay_runs_on_turns(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy")
    write_turns(tmp_path / "turns.jsonl", map(turn, range(24)))
    with ngram_server() as server:
        config_of(
            "roleplay", tmp_path, train="turns.jsonl", path="policy", embedding_model=server.url
        )
        small = {"grpo__max_completion_length": 8, "grpo__max_steps": 2, "misc__threads": 1}
        assert "24 turns of 6 scenarios" in ran(tmp_path, "trainer", "check", **small)
        ran(tmp_path, "trainer", "train", **small)
    assert (tmp_path / "runs/roleplay/log.jsonl").read_bytes().count(b"\n") == 2


def test_search_passes_its_check_without_a_generator_and_a_judge(tmp_path: Path) -> None:
    save_tiny(tmp_path / "policy")
    rows = [
        {"question": f"What is {n}?", "reference_answer": "x", "file_name": "a.pdf"}
        | {"reference_page": 1 + n % 3}
        for n in range(8)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "questions.jsonl").write_text(text, encoding="utf-8")
    pages = StandInRetriever({f"a_{n}": f"page {n}" for n in (1, 2, 3)})
    with running_app(pages.app) as url:
        config_of("search", tmp_path, train="questions.jsonl", url=url, path="policy")
        small = {"episode__sight": TINY_SIGHT, "generation__max_new_tokens": 32}
        out = ran(tmp_path, "trainer", "check", **small)
    assert "2 of 4 questions x 4 episodes" in " ".join(out.split())
    assert "generator" not in out and "judge 0, ndcg 0.9, format 0.1" in " ".join(out.split())


def test_synthesis_runs_on_lines_of_a_text(tmp_path: Path) -> None:
    lines = [f"The shop number {n} opens at nine in the morning." for n in range(8)]
    (tmp_path / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    teacher = FakeOpenAI(respond=korean)
    with teacher.running() as base_url, running_service(FakeBackend("metricx")) as metricx:
        name = teacher.model
        config_of("synth", tmp_path, files="[texts.txt]", base_url=base_url, model=name)
        urls = {"metricx__url": metricx, "metricx__checkpoint": "fake-metricx"}
        urls |= {"filters__rule_based": False}
        ran(tmp_path, "synth", "check", **urls)
        ran(tmp_path, "synth", "run", "--stage", "all", **urls)
    exported = (tmp_path / "runs/synth/export/train.jsonl").read_text(encoding="utf-8")
    assert {json.loads(line)["source_text"] for line in exported.splitlines()} == set(lines)


@pytest.mark.parametrize("task", TASKS)
def test_three_lines_are_to_change_and_the_next_commands_are_told(
    task: str, tmp_path: Path
) -> None:
    path = tmp_path / "a b.yaml"
    out = RUNNER.invoke(app, ["init", task, str(path)]).output
    text = path.read_text(encoding="utf-8")
    assert text.count(CHANGE) == 3 and 20 <= len(text.splitlines()) <= 25
    marked = [n for n, line in enumerate(text.splitlines(), 1) if CHANGE in line]
    assert [int(n) for n in re.findall(r"^ +(\d+):", out, re.MULTILINE)] == marked
    assert f"check --config '{path}'\n" in out and f"check --config '{path}'" in text
    second = RUNNER.invoke(app, ["init", task, str(path)])
    assert second.exit_code == 2 and path.read_text(encoding="utf-8") == text
    assert second.output == f"error: {path}: there is a file already. Choose another name\n"


def test_an_unknown_task_is_one_line(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["init", "translate", str(tmp_path / "my.yaml")])
    assert done.exit_code == 2 and not any(tmp_path.iterdir())
    assert done.output == (
        "error: translate: no such task. Choose from translation, roleplay, search, synth\n"
    )
