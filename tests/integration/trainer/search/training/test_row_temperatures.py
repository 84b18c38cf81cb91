"""Check training on questions with sampling temperatures of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from scorekit.errors import UserError
from tests.kits.trainer.searching import learning
from trainer.search.check import check_run
from trainer.search.config import SearchConfig
from trainer.search.data import load_train
from trainer.search.training.train import run_search
from trainer.search.trajectories.store import TrajectoryStore

#: By the position of the question; None: the run's.
TEMPERATURES = (0.5, None, 2.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("temperatures")
    with learning.running_services(learning.standing_in().app, learning.counting().app) as services:
        settings = learning.config_of(
            folder,
            services,
            data={"eval": None},
            rl={
                "num_updates": 1,
                "batch_size": 6,
                "warmup_updates": 0,
                "importance_correction": "on",
                "kl_coef": 0.1,
                "ppo_epochs": 1,
                "minibatch_size": None,
                "micro_batch_tokens": 4000,  # several rows a pass
            },
        )
        learning.write_questions(folder / "train.jsonl", range(6), temperatures=TEMPERATURES)
        yield learning.write_config(folder / "config.yaml", settings)


def check_exact(out: Path) -> None:
    """Check the one update in `out`: sampler, trainer and reference read the same numbers."""
    (line,) = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert line["steps"] > 0 and line["samples"] == 24
    assert line["sampler_gap_max"] < 1e-4  # at another temperature: 0.5 and more
    assert abs(line["approx_kl"]) < 1e-6 and not line["clip_frac"]
    assert line["kl_ref_k3"] < 1e-6
    trajectories = list(TrajectoryStore(out / "trajectories").read([1]))
    assert {trajectory.question.temperature for trajectory in trajectories} == set(TEMPERATURES)


@pytest.mark.parametrize(("algorithm", "deterministic"), [("gspo", False), ("ppo", True)])
def test_sampler_and_trainer_agree(
    config: Path, tmp_path: Path, algorithm: str, deterministic: bool
) -> None:
    overrides = [
        f"rl.algorithm={algorithm}",
        f"rollout.deterministic={deterministic}",
        f"misc.run_dir={tmp_path}",
    ]
    cfg = load_config(SearchConfig, config, overrides)
    assert run_search(load_train(cfg), {}, cfg).exit_code == 0
    check_exact(tmp_path)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.009])
def test_a_greedy_question_is_refused_before_anything_is_loaded(
    config: Path, tmp_path: Path, temperature: float
) -> None:
    data = learning.write_questions(tmp_path / "t.jsonl", range(6), temperatures=(1.0, temperature))
    overrides: list[Any] = [f"data.train={data}", f"misc.run_dir={tmp_path}/out"]
    cfg = load_config(SearchConfig, config, overrides)
    message = r"temperature of 3 questions \(q1 first\): less than 0.01 is greedy"
    with pytest.raises(UserError, match=message):
        run_search(load_train(cfg), {}, cfg)
    failed = " ".join(str(finding) for finding in check_run(cfg).failed)
    assert "temperature of 3 questions (q1 first): less than 0.01 is greedy" in failed


def test_check_tells_the_range(config: Path, tmp_path: Path) -> None:
    findings = check_run(load_config(SearchConfig, config, [f"misc.run_dir={tmp_path}"]))
    assert not findings.failed, findings.failed
    message_by_check = {check.name: check.result for check in findings.checks}
    expected = ", temperature 0.5 to 2.0 (4 questions have their own)"
    assert message_by_check["updates"].endswith(expected)
