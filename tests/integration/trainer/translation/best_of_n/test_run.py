"""Test runs of best-of-n SFT: the rows, the controls, kill -9 in each stage, and the comparison."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from scorekit.config import load_config
from testing.servers import running_service, wait_until
from tests.kits.forked import Command, completed
from tests.kits.trainer.rewards import Recorder
from tests.kits.trainer.runs import letter_tokenizer, save_policy, write_examples
from trainer.__main__ import app
from trainer.runs.run_log import read_jsonl
from trainer.translation.best_of_n.check import check_run
from trainer.translation.best_of_n.commands import report
from trainer.translation.best_of_n.config import BestOfNConfig

SOURCES = ["".join(letters) for letters in product("abcdef", repeat=3)][:140]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("best") / "policy", letter_tokenizer())


@pytest.fixture
def service() -> Iterator[tuple[Recorder, str]]:
    recorder = Recorder("metricx")
    with running_service(recorder) as url:
        recorder.samples.clear()  # those of the warm-up
        yield recorder, url


def config(folder: Path, policy: Path, url: str, count: int = 20, **changes: Any) -> Path:
    pairs = write_examples(folder / "pairs.jsonl", SOURCES[:60], ref="abc")
    values: dict[str, Any] = {
        "task": "best_of_n",
        "data": {"train": str(write_examples(folder / "t.jsonl", SOURCES[:count]))},
        "policy": {"path": str(policy)},
        "generation": {
            "prompt_template": "source",
            "max_new_tokens": 24,
            "num_samples_per_prompt": 6,
        },
        "reward": {"metricx_urls": url, "w_xcomet_span": 0},
        "pairs": {"path": str(pairs), "share": 0.25},
        "sft": {"max_steps": 3, "learning_rate": 0.001},
        "misc": {
            "device": "cpu",
            "threads": 1,
            "run_dir": str(folder / "run"),
            "caching": False,  # the recorder sees every request
        },
    }
    for section, keys in changes.items():
        values[section] = values.get(section, {}) | keys
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def train(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["train", "--config", str(path), *options])


def test_the_rows_are_the_best_samples_and_pairs(
    tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    recorder, url = service
    held_out = write_examples(tmp_path / "e.jsonl", ["hg", "gh"], ref="abc")
    path = config(tmp_path, policy, url, data={"eval": str(held_out)})
    findings = check_run(load_config(BestOfNConfig, path))
    assert not findings.errors
    results = {check.name: check.result for check in findings.checks}
    assert results["pairs.path"] == "60 pairs, 0.25 of the rows" and results["sft"] == "3 updates"
    done = train(path)
    assert done.exit_code == 0, done.output
    run = tmp_path / "run"
    rows = read_jsonl(run / "rows.jsonl")
    chosen = [row for row in rows if row["kind"] == "sample"]
    assert Counter(row["kind"] for row in rows)["pair"] == round(len(chosen) / 3)
    scores = {
        line["source"]: line["candidates"] for line in read_jsonl(run / "candidates/scores.jsonl")
    }
    for row in chosen:
        complete = [c for c in scores[int(row["id"])] if c["is_complete"] and c["text"].strip()]
        best = max(c["reward"] for c in complete if c["reward"] is not None)
        reply = [i for i, m in zip(row["input_ids"], row["action_mask"], strict=True) if m]
        (match,) = [c for c in complete if c["ids"] == reply]
        assert match["reward"] == best
    selection = json.loads((run / "selection.json").read_text("utf-8"))
    assert selection["chosen"] == len(chosen) and selection["by"] == "reward"
    assert selection["reward_of_chosen"] > selection["reward_of_samples"]
    assert len(read_jsonl(run / "sft/log.jsonl")) == 3
    checkpoint = run / "sft/checkpoints/step-000003"
    assert f"A: {policy}\nB: {checkpoint}" in done.output
    assert done.output.rstrip().endswith(f"policy: {checkpoint}")

    # A finished run tells its results again, and asks for nothing.
    recorder.samples.clear()
    second = train(path, "--resume")
    assert second.exit_code == 0 and not recorder.samples
    assert f"policy: {checkpoint}" in second.output and f"B: {checkpoint}" in second.output
    assert report(run) == 0

    refused = train(path)
    assert refused.exit_code == 2 and "has a run. Go on with it (--resume)" in refused.stderr
    other = train(path, "--resume", "--set", "choice.by=random")
    assert other.exit_code == 2
    assert "choice.by: 'reward' then, 'random' now" in other.stderr
    anew = train(path, "--set", "choice.by=random", "--set", "misc.overwrite=true")
    assert anew.exit_code == 0, anew.output
    assert json.loads((run / "selection.json").read_text("utf-8"))["by"] == "random"


def test_more_sft_on_the_pairs_alone_samples_nothing(
    tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    path = config(tmp_path, policy, service[1], pairs={"share": 1})
    done = train(path)
    assert done.exit_code == 0, done.output
    assert Counter(row["kind"] for row in read_jsonl(tmp_path / "run/rows.jsonl")) == {"pair": 60}
    assert not service[0].samples and "rows: 60, 60 of them pairs" in done.output


@pytest.mark.parametrize("stage", ["scores", "sft"])
def test_a_killed_run_goes_on_in_its_stage(
    stage: str, tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    recorder, url = service
    changes = {"sft": {"max_steps": 40}, "misc": {"save_every_n_updates": 1}}
    path = config(tmp_path, policy, url, len(SOURCES), **changes)
    run, command = tmp_path / "run", ["trainer", "train", "--config", str(path)]
    watched = {"scores": run / "candidates/scores.jsonl", "sft": run / "sft/log.jsonl"}[stage]
    process = Command(*command, environment=ENVIRONMENT)
    lines = 3 if stage == "sft" else 1
    wait_until(lambda: process.poll() is not None or len(read_jsonl(watched)) >= lines)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    scored = read_jsonl(run / "candidates/scores.jsonl")
    assert process.returncode == -signal.SIGKILL and scored
    done_texts = {
        (SOURCES[line["source"]], c["text"]) for line in scored for c in line["candidates"]
    }
    rows = (run / "rows.jsonl").read_bytes() if stage == "sft" else None
    recorder.samples.clear()
    resumed = completed(*command, "--resume", environment=ENVIRONMENT)
    assert resumed.returncode == 0, resumed.stderr
    assert not done_texts & {(sample.src, sample.mt) for sample in recorder.samples}
    lines_of_sources = read_jsonl(run / "candidates/scores.jsonl")
    assert [line["source"] for line in lines_of_sources] == list(range(len(SOURCES)))
    if stage == "sft":
        assert not recorder.samples and (run / "rows.jsonl").read_bytes() == rows
    log = read_jsonl(run / "sft/log.jsonl")
    assert [line["update"] for line in log] == list(range(1, 41))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "has no run of best-of-n SFT"),
        (["--set", "pairs.path=none.jsonl"], "none.jsonl"),
        (["--set", "generation.num_samples_per_prompt=1"], "num_samples_per_prompt"),
        (["--set", "data.train=null"], "data.train: required"),
        (["--set", "pairs.path=null", "--set", "pairs.share=1"], "Set pairs.path"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_asked(
    options: list[str], message: str, tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    done = train(config(tmp_path, policy, service[1]), *options)
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not service[0].samples


def test_a_folder_that_is_no_such_run_stays(
    tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    path = config(tmp_path, policy, service[1], misc={"overwrite": True})
    (tmp_path / "run/sft").mkdir(parents=True)
    done = train(path)
    assert done.exit_code == 2 and "which are of no best-of-n run" in done.stderr
    assert (tmp_path / "run/sft").is_dir()
