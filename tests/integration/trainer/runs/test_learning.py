"""Check that a policy of letters learns what it is rewarded for, in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scorekit.config import load_config
from scorekit.errors import SampleError, UserError
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.runs import (
    example,
    letter_tokenizer,
    tiny_llama,
)
from trainer.translation.config import TranslationConfig
from trainer.translation.train import Artifacts, train_translation


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class LetterBackend(FakeBackend):
    """metricx: 25 x the share of letters that are not `a`. xcomet: every `b` is an error.

    failing: share of the samples without a score (the text decides)."""

    def __init__(self, service: Any, failing: bool = False) -> None:
        super().__init__(service)
        self.failing = failing

    def encode(self, samples: Sequence[Any], options: Any) -> list[Encoded | SampleError]:
        encoded = super().encode(samples, options)
        if self.failing and not samples[0].src.startswith("word "):  # not a sample of the warm-up
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
        TranslationConfig, None, [*(f"{key}={value}" for key, value in base.items()), *overrides]
    )
    torch.seed()  # what came before is no part of a run
    return train_translation(examples[:16], examples[16:], cfg)


@pytest.fixture(scope="module")
def letter_urls() -> Iterator[tuple[str, str]]:
    with (
        running_service(LetterBackend("metricx")) as m,
        running_service(LetterBackend("xcomet")) as x,
    ):
        yield m, x


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
def test_the_reward_rises(tmp_path: Path, letter_urls: tuple[str, str], algorithm: str) -> None:
    artifacts = toy(tmp_path, letter_urls, f"rl.algorithm={algorithm}", "rl.center_groups=true")
    rewards = [line["r_seq_mean"] for line in artifacts.updates]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 5
    before, after = artifacts.reports[0][1], artifacts.reports[-1][1]
    assert after["metricx_score_mean"] is not None and before["metricx_score_mean"] is not None
    assert after["metricx_score_mean"] < before["metricx_score_mean"] - 5


def test_spans_alone_drive_out_the_marked_tokens(
    tmp_path: Path, letter_urls: tuple[str, str]
) -> None:
    artifacts = toy(tmp_path, ("[]", letter_urls[1]), "reward.w_metricx=0")
    marked = [line["token_rewards_nonzero_frac"] for line in artifacts.updates]
    assert artifacts.updates[0]["metricx_score_mean"] is None
    assert marked[0] > 0.05
    assert sum(marked[-3:]) / 3 < 0.3 * marked[0]


def test_stopping_is_learned(tmp_path: Path) -> None:
    """Check that EOS gets its share of the reward, and that no service is needed without other
    rewards."""
    artifacts = toy(
        tmp_path,
        ("[]", "[]"),
        "reward.w_metricx=0",
        "reward.w_xcomet_span=0",
        "reward.no_eos_penalty=5",
        "rl.num_updates=8",
    )
    cut = [line["truncated_frac"] for line in artifacts.updates]
    assert cut[0] > 0.3
    assert cut[-1] < 0.1


def test_the_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    overrides = ["reward.w_metricx=0", "reward.w_xcomet_span=0", "reward.no_eos_penalty=5"]
    schedule = ["rl.num_updates=3", "rl.lr_decay=linear", "rl.lr=0.003"]
    artifacts = toy(tmp_path, ("[]", "[]"), *overrides, *schedule)
    assert [line["lr"] for line in artifacts.updates] == pytest.approx([0.003, 0.002, 0.001])
    state = torch.load(artifacts.checkpoint / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["lr"] == pytest.approx(0.001)


def test_the_same_seed_gives_the_same_run(tmp_path: Path, letter_urls: tuple[str, str]) -> None:
    first = toy(tmp_path / "1", letter_urls, "rl.num_updates=3")
    second = toy(tmp_path / "2", letter_urls, "rl.num_updates=3")
    other = toy(tmp_path / "3", letter_urls, "rl.num_updates=3", "misc.seed=4")
    timing = {"rollout_s", "logprob_s", "reward_s", "update_s"}

    def comparable_stats(run: Artifacts) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k not in timing} for line in run.updates]

    assert comparable_stats(first) == comparable_stats(second)
    assert comparable_stats(first) != comparable_stats(other)


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
        artifacts = toy(tmp_path, (url, letter_urls[1]), "rl.num_updates=1")
    (line,) = artifacts.updates
    assert line["skipped"] is True
    assert line["metricx_coverage"] == 0
    assert line["metricx_score_mean"] is None
    assert line["r_seq_mean"] is None
    for name in ("policy_loss", "approx_kl", "clip_frac", "grad_norm", "kl_ref", "A_raw_mean"):
        assert line[name] is None, name
    assert line["steps"] == 0
    assert "update 1 is skipped" in caplog.text
    before, after = (report.examples for _, report in artifacts.reports)
    assert [row["mt"] for row in before] == [row["mt"] for row in after]
    assert all("model_failure" in row["error"] for row in before)
