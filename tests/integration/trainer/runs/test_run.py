"""Whole runs against services on real ports: one command, bad input, and a reward that rises."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bench.kit.servers import free_port, running_service
from scorekit.config import load_config
from scorekit.errors import SampleError, UserError
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend
from tests.kits.trainer import warm
from tests.kits.trainer.runs import (
    byte_level_tokenizer,
    example,
    letter_tokenizer,
    save_policy,
    tiny_llama,
    write_examples,
)
from trainer.translation.config import TrainerConfig
from trainer.translation.train import Artifacts, run_toy_rl

ROOT = Path(__file__).parents[4]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("METRICX_URL", "XCOMET_URL")} | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainer", *arguments]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Forked from a process that has loaded what it needs; `command` begins with nothing."""
    return warm.completed("trainer", *arguments, environment=ENVIRONMENT | environment)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def fake_urls() -> Iterator[dict[str, str]]:
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        yield {"METRICX_URL": m, "XCOMET_URL": x}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one update on 8 prompts, with a byte-level tokenizer and a random Llama."""
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
    """Generate -> reward -> advantage -> 1 update -> evaluate again, on 32 samples."""
    environment = fake_urls | {"SCOREKIT_API_KEY": "THE-KEY"}
    told = ("--set", "misc.overwrite=true", "--verbose")
    done = run("train", "--config", str(config), *told, **environment)
    assert done.returncode == 0, done.stderr
    out = config.parent / "out"
    written = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"THE-KEY" not in written and "THE-KEY" not in done.stdout + done.stderr
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
    assert len(scored) >= 30  # the fake fails on a text with `nan`, which chance may write
    for row in scored:
        lengths = {len(row[k]) for k in ("token_char_offsets", "token_rewards", "advantages")}
        assert lengths == {row["tokens"]}
        for span in row["error_spans"]:
            assert row["mt"][span["start"] : span["end"]] == span["text"]
    assert "before" in done.stdout and "after" in done.stdout
    assert f"{line['approx_kl']:.2e}" in done.stderr
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")
    assert "Traceback" not in done.stderr
    resolved = load_config(TrainerConfig, out / "config.yaml")
    assert resolved.rl.batch_size == 8

    checkpoint = out / "checkpoints/step-000001"
    again = run(
        "evaluate",
        "--config",
        str(config),
        "--set",
        f"policy.path={checkpoint}",
        "--limit",
        "2",
        **fake_urls,
    )
    assert again.returncode == 0, again.stderr
    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert report["samples"] == 2
    nothing = run("report", str(out / "completions"))
    assert nothing.returncode == 2 and "no run here" in nothing.stderr
    after = read(out / "completions/eval-000001.jsonl")
    assert [row["mt"] for row in read(out / "evaluation.jsonl")] == [row["mt"] for row in after[:2]]


def check_log_line(line: dict[str, Any]) -> None:
    """Every figure that the log of an update has to have."""
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
    ("arguments", "told"),
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
    config: Path, fake_urls: dict[str, str], arguments: list[str], told: str
) -> None:
    urls = fake_urls if arguments else fake_urls | {"XCOMET_URL": f"http://127.0.0.1:{free_port()}"}
    done = run("train", "--config", str(config), "--set", "misc.overwrite=true", *arguments, **urls)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("command_name", ["train", "evaluate"])
def test_a_run_dir_that_cannot_be_made(
    config: Path, fake_urls: dict[str, str], tmp_path: Path, command_name: str
) -> None:
    (tmp_path / "file").write_text("")
    folder = f"misc.run_dir={tmp_path}/file/run"
    done = run(command_name, "--config", str(config), "--set", folder, **fake_urls)
    assert done.returncode == 2
    assert "error: misc.run_dir:" in done.stderr and "Not a directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_loads_no_torch() -> None:
    script = (
        "import sys, runpy; sys.argv = ['trainer', 'train', '--help']\n"
        "try: runpy.run_module('trainer', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--config" in done.stdout


def test_ctrl_c_ends_cleanly(config: Path, fake_urls: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(
            "train",
            "--config",
            str(config),
            "--set",
            "rl.num_updates=100000",
            "--set",
            f"misc.run_dir={tmp_path}",
        ),
        cwd=ROOT,
        env=ENVIRONMENT | fake_urls,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 600
    while not (tmp_path / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped" in errors
    assert "Traceback" not in errors


# ---- a toy task: MetricX likes the letter a, xCOMET marks the letter b


class LetterBackend(FakeBackend):
    """metricx: 25 x the share of letters that are not `a`. xcomet: every `b` is an error.

    failing: share of the samples that have no score (decided by the text).
    """

    def __init__(self, service: Any, failing: bool = False) -> None:
        super().__init__(service)
        self.failing = failing

    def encode(self, samples: Sequence[Any], options: Any) -> list[Encoded | SampleError]:
        encoded = super().encode(samples, options)
        if self.failing and not samples[0].src.startswith("word "):  # the warm-up's
            return [SampleError("model_failure", "out of order") for _ in encoded]
        return encoded

    def _outcome(self, sample: Any) -> Outcome:
        mt = sample.mt
        if self.service == "metricx":
            return {"score": 25.0 * (1 - mt.count("a") / len(mt)) if mt else 25.0}
        spans = [
            {"start": i, "end": i + 1, "severity": "MAJOR", "confidence": 1.0, "text": "b"}
            for i, letter in enumerate(mt)
            if letter == "b"
        ]
        return {"score": 1.0, "error_spans": spans}


def toy(folder: Path, urls: Sequence[str], *overrides: str) -> Artifacts:
    tokenizer = letter_tokenizer()
    policy = folder / "policy"
    tiny_llama(tokenizer).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    letters = random.Random(0)
    examples = [
        example("".join(letters.choices("abcdefgh", k=letters.randint(2, 6))), str(n))
        for n in range(24)
    ]
    base = {
        "policy.path": policy,
        "generation.prompt_template": "source",
        "generation.max_new_tokens": 8,
        "reward.metricx_urls": urls[0],
        "reward.xcomet_urls": urls[1],
        "reward.deadline_s": 60,
        "rl.num_updates": 12,
        "rl.batch_size": 16,
        "rl.lr": 5e-3,
        "rl.kl_coef": 0.01,
        "eval.eval_every_n_updates": 0,
        "misc.run_dir": folder / "out",
        "misc.device": "cpu",
        "misc.threads": 1,
        "misc.seed": 3,
    }
    cfg = load_config(
        TrainerConfig, None, [*(f"{key}={value}" for key, value in base.items()), *overrides]
    )
    torch.seed()  # what came before is no part of a run
    return run_toy_rl(examples[:16], examples[16:], cfg)


@pytest.fixture(scope="module")
def letter_urls() -> Iterator[tuple[str, str]]:
    with (
        running_service(LetterBackend("metricx")) as m,
        running_service(LetterBackend("xcomet")) as x,
    ):
        yield m, x


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
def test_the_reward_rises(tmp_path: Path, letter_urls: tuple[str, str], algorithm: str) -> None:
    done = toy(tmp_path, letter_urls, f"rl.algorithm={algorithm}", "rl.center_groups=true")
    rewards = [line["r_seq_mean"] for line in done.updates]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 5
    before, after = done.reports[0][1], done.reports[-1][1]
    assert after["metricx_score_mean"] is not None and before["metricx_score_mean"] is not None
    assert after["metricx_score_mean"] < before["metricx_score_mean"] - 5


def test_spans_alone_drive_out_the_marked_tokens(
    tmp_path: Path, letter_urls: tuple[str, str]
) -> None:
    done = toy(tmp_path, ("[]", letter_urls[1]), "reward.w_metricx=0")
    marked = [line["token_rewards_nonzero_frac"] for line in done.updates]
    assert done.updates[0]["metricx_score_mean"] is None
    assert marked[0] > 0.05
    assert sum(marked[-3:]) / 3 < 0.3 * marked[0]


def test_stopping_is_learned(tmp_path: Path) -> None:
    """The EOS gets its share of the reward; with no other reward no service is needed."""
    done = toy(
        tmp_path,
        ("[]", "[]"),
        "reward.w_metricx=0",
        "reward.w_xcomet_span=0",
        "reward.no_eos_penalty=5",
        "rl.num_updates=8",
    )
    cut = [line["truncated_frac"] for line in done.updates]
    assert cut[0] > 0.3
    assert cut[-1] < 0.1


def test_the_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    overrides = ["reward.w_metricx=0", "reward.w_xcomet_span=0", "reward.no_eos_penalty=5"]
    schedule = ["rl.num_updates=3", "rl.lr_decay=linear", "rl.lr=0.003"]
    done = toy(tmp_path, ("[]", "[]"), *overrides, *schedule)
    assert [line["lr"] for line in done.updates] == pytest.approx([0.003, 0.002, 0.001])
    state = torch.load(done.checkpoint / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["lr"] == pytest.approx(0.001)


def test_the_same_seed_gives_the_same_run(tmp_path: Path, letter_urls: tuple[str, str]) -> None:
    first = toy(tmp_path / "1", letter_urls, "rl.num_updates=3")
    second = toy(tmp_path / "2", letter_urls, "rl.num_updates=3")
    other = toy(tmp_path / "3", letter_urls, "rl.num_updates=3", "misc.seed=4")
    timing = {"rollout_s", "logprob_s", "reward_s", "update_s"}

    def figures(run: Artifacts) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k not in timing} for line in run.updates]

    assert figures(first) == figures(second)
    assert figures(first) != figures(other)


def test_a_prompt_that_does_not_fit_is_told_before_anything_is_replaced(
    tmp_path: Path, letter_urls: tuple[str, str]
) -> None:
    toy(tmp_path, letter_urls, "rl.num_updates=1")
    log = (tmp_path / "out/log.jsonl").read_text()
    for key, name in (("generation.max_new_tokens=125", "0"), ("eval.max_new_tokens=125", "16")):
        with pytest.raises(UserError, match=f"example {name}: a prompt of"):
            toy(tmp_path, letter_urls, key, "misc.overwrite=true", "data.overlong_prompts=refuse")
    assert (tmp_path / "out/log.jsonl").read_text() == log
    services = json.loads((tmp_path / "out/services.json").read_text())
    assert {url: info["service"] for url, info in services.items()} == {
        letter_urls[0]: "metricx",
        letter_urls[1]: "xcomet",
    }


@pytest.mark.usefixtures("no_second_try")
def test_a_batch_without_a_score_is_skipped(
    tmp_path: Path, letter_urls: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with running_service(LetterBackend("metricx", failing=True)) as url:
        done = toy(tmp_path, (url, letter_urls[1]), "rl.num_updates=1")
    (line,) = done.updates
    assert line["skipped"] is True
    assert line["metricx_coverage"] == 0
    assert line["metricx_score_mean"] is None
    assert line["r_seq_mean"] is None
    for name in ("policy_loss", "approx_kl", "clip_frac", "grad_norm", "kl_ref", "A_raw_mean"):
        assert line[name] is None, name
    assert line["steps"] == 0
    assert "update 1 is skipped" in caplog.text
    before, after = (report.examples for _, report in done.reports)
    assert [row["mt"] for row in before] == [row["mt"] for row in after]
    assert all("model_failure" in row["error"] for row in before)
