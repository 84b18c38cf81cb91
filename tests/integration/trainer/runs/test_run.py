"""Test full runs against services on real ports: one command, bad input, a rising reward."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scorekit.config import load_config
from scorekit.server.fake import FakeBackend
from testing.servers import free_port, running_service, wait_until
from tests.kits import forked
from tests.kits.trainer.runs import (
    byte_level_tokenizer,
    save_policy,
    write_examples,
)
from trainer.translation.config import TranslationConfig

ROOT = Path(__file__).parents[4]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("METRICX_URL", "XCOMET_URL")} | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(
    *arguments: str, charts: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, forked from a process that has loaded its imports."""
    return forked.completed(
        "trainer", *arguments, environment=ENVIRONMENT | environment, charts=charts
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def fake_urls() -> Iterator[dict[str, str]]:
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        yield {"METRICX_URL": m, "XCOMET_URL": x}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the config of one update on 8 prompts, with a byte-level tokenizer and a random
    Llama."""
    folder = tmp_path_factory.mktemp("run")
    save_policy(folder / "policy", byte_level_tokenizer())
    train = write_examples(folder / "train.jsonl", [f"Open file {n}." for n in range(8)])
    held_out = write_examples(folder / "eval.jsonl", [f"Save {n}." for n in range(4)], ref="저장")
    values = {
        "data": {"train": str(train), "eval": str(held_out)},
        "policy": {"path": str(folder / "policy")},
        "generation": {
            "prompt_template": "source",
            "max_new_tokens": 12,
            "num_samples_per_prompt": 4,
        },
        "rl": {"num_updates": 1, "batch_size": 8, "lr": 1e-3},
        "eval": {"eval_every_n_updates": 1},
        "misc": {"threads": 1, "device": "cpu", "run_dir": str(folder / "out")},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_generate_reward_advantage_update_evaluate_in_one_command(
    config: Path, fake_urls: dict[str, str]
) -> None:
    """Check generation, reward, advantage, one update and a second evaluation on 32 samples."""
    environment = fake_urls | {"SCOREKIT_API_KEY": "THE-KEY"}
    options = ("--set", "misc.overwrite=true", "--verbose")
    result = run("train", "--config", str(config), *options, charts=True, **environment)
    assert result.returncode == 0, result.stderr
    out = config.parent / "out"
    written = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"THE-KEY" not in written and "THE-KEY" not in result.stdout + result.stderr
    (line,) = read(out / "log.jsonl")
    check_log_line(line)
    evaluations = read(out / "eval.jsonl")
    assert [evaluation["update"] for evaluation in evaluations] == [0, 1]
    for evaluation in evaluations:
        assert evaluation["samples"] == 4
        assert evaluation["chrf"] is not None
        assert evaluation["bleu_tokenize"] == "char"
        dump = read(out / evaluation["completions"])
        assert [row["src"] for row in dump] == [f"Save {n}." for n in range(4)]
        assert all(row["ref"] == "저장" for row in dump)
    completions = read(out / "completions/train-000001.jsonl")
    assert len(completions) == 32
    scored = [row for row in completions if row["error"] is None]
    assert len(scored) >= 30  # the fake fails on `nan`, which the policy may sample
    for row in scored:
        lengths = {len(row[k]) for k in ("token_char_offsets", "token_rewards", "advantages")}
        assert lengths == {row["tokens"]}
        for span in row["error_spans"]:
            assert row["mt"][span["start"] : span["end"]] == span["text"]
    assert "before" in result.stdout and "after" in result.stdout
    assert f"{line['approx_kl']:.2e}" in result.stderr
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")
    assert "Traceback" not in result.stderr
    resolved = load_config(TranslationConfig, out / "config.yaml")
    assert resolved.rl.batch_size == 8

    checkpoint = out / "checkpoints/step-000001"
    later_evaluation = run(
        "evaluate",
        "--config",
        str(config),
        "--set",
        f"policy.path={checkpoint}",
        "--limit",
        "2",
        **fake_urls,
    )
    assert later_evaluation.returncode == 0, later_evaluation.stderr
    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert report["samples"] == 2
    nothing = run("report", str(out / "completions"))
    assert nothing.returncode == 2 and "not a run" in nothing.stderr
    (out / "data").mkdir()
    (out / "data/eval.jsonl").write_text('{"prompt": "of prepared data"}\n')
    nothing = run("report", str(out / "data"))
    assert nothing.returncode == 2 and "not a run" in nothing.stderr
    after = read(out / "completions/eval-000001.jsonl")
    assert [row["mt"] for row in read(out / "evaluation.jsonl")] == [row["mt"] for row in after[:2]]


def check_log_line(line: dict[str, Any]) -> None:
    """Check that the log line of an update has every required stat."""
    for name in (
        "completion_length_mean",
        *(
            f"{n}_{k}"
            for n in ("metricx_score", "metricx_reward", "xcomet_score", "token_rewards")
            for k in ("mean", "std")
        ),
        "token_rewards_nonzero_frac",
        *(f"spans_{severity}_mean" for severity in ("MINOR", "MAJOR", "CRITICAL")),
        "policy_loss",
        "approx_kl",
        "clip_frac",
        "kl_ref",
        "metricx_coverage",
        "xcomet_coverage",
        "reward_coverage",
        "rollout_s",
        "logprob_s",
        "reward_s",
        "update_s",
    ):
        assert isinstance(line[name], float | int), name
    assert line["A_norm_mean"] == pytest.approx(0, abs=1e-6)
    assert line["A_norm_std"] == pytest.approx(1, abs=1e-3)
    assert line["A_raw_std"] > 0
    assert line["samples"] == 32
    assert line["steps"] == 2
    assert line["update"] == 1
    assert line["skipped"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "rl.learning_rate=1"], "rl.learning_rate: Extra inputs"),
        (["--set", "data.train=gone.jsonl"], "gone.jsonl: no such file"),
        (["--set", "policy.path=./gone"], "policy.path: ./gone: no such folder"),
        (
            ["--set", "generation.top_p=0.9", "--set", "rl.importance_correction=off"],
            "generation.top_p",
        ),
        ([], "cannot be reached"),
    ],
    ids=["unknown key", "no data", "no policy", "top_p", "service down"],
)
def test_bad_input_is_one_line_and_exit_2(
    config: Path, fake_urls: dict[str, str], arguments: list[str], message: str
) -> None:
    urls = fake_urls if arguments else fake_urls | {"XCOMET_URL": f"http://127.0.0.1:{free_port()}"}
    result = run(
        "train", "--config", str(config), "--set", "misc.overwrite=true", *arguments, **urls
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("command_name", ["train", "evaluate"])
def test_a_run_dir_that_cannot_be_made(
    config: Path, fake_urls: dict[str, str], tmp_path: Path, command_name: str
) -> None:
    (tmp_path / "file").write_text("")
    folder = f"misc.run_dir={tmp_path}/file/run"
    result = run(command_name, "--config", str(config), "--set", folder, **fake_urls)
    assert result.returncode == 2
    assert "error: misc.run_dir:" in result.stderr and "Not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_loads_no_torch() -> None:
    script = (
        "import sys, runpy; sys.argv = ['trainer', 'train', '--help']\n"
        "try: runpy.run_module('trainer', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "--config" in result.stdout


def test_ctrl_c_ends_cleanly(config: Path, fake_urls: dict[str, str], tmp_path: Path) -> None:
    settings = ("--set", "rl.num_updates=100000", "--set", f"misc.run_dir={tmp_path}")
    process = forked.Command(
        "trainer",
        *("train", "--config", str(config), *settings),
        environment=ENVIRONMENT | fake_urls,
    )
    wait_until(lambda: process.poll() is not None or (tmp_path / "log.jsonl").exists(), 240)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "stopped" in errors
    assert "Traceback" not in errors
