"""Check updates whose questions get their episodes by the results so far."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from scorekit.errors import UserError
from tests.integration.trainer.search.training.test_processes import ENVIRONMENT
from tests.kits import forked
from tests.kits.trainer.searching import learning
from trainer.search.check import check_run
from trainer.search.collect import collect
from trainer.search.config import SearchConfig
from trainer.search.data import load_held_out, load_train
from trainer.search.evaluation.stats import curves
from trainer.search.records import Trajectory
from trainer.search.training.online_budget import Results, allocate
from trainer.search.training.train import run_search
from trainer.search.trajectories.store import TrajectoryStore

UPDATES, QUESTIONS, N_AGENT, MOST = 5, 3, 4, 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("online")
    with learning.running_services(learning.standing_in().app, learning.counting().app) as services:
        services["answering"]["generator"] |= {"max_output_tokens": 8, "tokens_per_image": 1}
        settings = learning.config_of(
            folder,
            services,
            rl={"num_updates": UPDATES, "warmup_updates": 0},
            reward={"preset": "focused"},
            rollout={"n_agent": N_AGENT, "online_budget": {"n_max": MOST}},
            eval={"eval_every_n_updates": 0},
            misc={"save_every_n_updates": 0},
        )
        learning.write_questions(folder / "train.jsonl", range(6))
        yield learning.write_config(folder / "config.yaml", settings)


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with nothing set besides."""
    return train(config, tmp_path_factory.mktemp("plain") / "run")


def load(config: Path, out: Path, *overrides: str) -> SearchConfig:
    return load_config(SearchConfig, config, [f"misc.run_dir={out}", *overrides])


def train(config: Path, out: Path, *overrides: str, code: int = 0) -> Path:
    cfg = load(config, out, *overrides)
    assert run_search(load_train(cfg), load_held_out(cfg), cfg).exit_code == code
    return out


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def stored(out: Path, update: int) -> list[Trajectory]:
    return list(TrajectoryStore(out / "trajectories").read([update]))


def counts_of(trajectories: list[Trajectory]) -> dict[int, int]:
    """Return the number of episodes of each position."""
    return dict(Counter(int(t.trajectory_id.rsplit("-", 2)[1]) for t in trajectories))


def check_decisions(
    out: Path, lead: int = 0, earlier_runs: tuple[Path, ...] = (), updates: int = UPDATES
) -> None:
    """Check each first round against an allocation by the results up to `lead` updates before.

    earlier_runs: runs that were played earlier."""
    for update in range(1, updates + 1):
        results = Results(success=0.5)
        for run in earlier_runs:
            results.add(TrajectoryStore(run / "trajectories").read())
        for earlier in range(1, update - lead):
            results.add(stored(out, earlier))
        trajectories = [
            t for t in stored(out, update) if int(t.trajectory_id.rsplit("-", 2)[1]) < QUESTIONS
        ]
        questions = {t.trajectory_id.rsplit("-", 2)[1]: t.question for t in trajectories}
        beliefs = [results.belief(questions[str(position)]) for position in range(QUESTIONS)]
        expected = allocate(beliefs, QUESTIONS * N_AGENT, 2, MOST)
        assert counts_of(trajectories) == dict(enumerate(expected)), update


def test_each_update_shares_the_same_total_out_by_the_results_before_it(plain: Path) -> None:
    check_decisions(plain)
    lines = lines_of(plain)
    assert [line["samples"] for line in lines] == [QUESTIONS * N_AGENT] * UPDATES
    assert lines[0]["budget_episodes_min"] == lines[0]["budget_episodes_max"] == N_AGENT
    assert any(line["budget_episodes_max"] > N_AGENT for line in lines), "nothing is shared out"


def test_the_log_has_the_numbers_and_the_spread_that_came(plain: Path) -> None:
    for update, line in enumerate(lines_of(plain), 1):
        trajectories = stored(plain, update)
        counts = list(counts_of(trajectories).values())
        assert line["budget_episodes_min"] == min(counts)
        assert line["budget_episodes_max"] == max(counts)
        assert line["budget_episodes_mean"] == N_AGENT
        assert 0 < line["budget_spread_expected"] < 1 and line["budget_money_left"] is None
        groups: dict[str, set[bool]] = {t.group: set() for t in trajectories}
        for t in trajectories:
            assert t.reward is not None and t.reward.value is not None
            groups[t.group].add(t.reward.value >= 0.5)
        assert line["budget_spread"] == pytest.approx(
            sum(len(kinds) == 2 for kinds in groups.values()) / QUESTIONS
        )
        curve_keys = {key for curve in curves() for key in curve.keys if key.startswith("budget_")}
        assert len(curve_keys) == 5 and curve_keys <= line.keys()


def test_several_processes_agree(config: Path, tmp_path: Path) -> None:
    flags = ("--set", f"misc.run_dir={tmp_path}", "--set", "rl.num_updates=2")
    arguments = ("train", "--config", str(config), *flags)
    result = forked.completed("trainer", *arguments, environment=ENVIRONMENT, ranks=2)
    assert result.returncode == 0, result.stderr
    check_decisions(tmp_path, updates=2)


def test_rollouts_that_are_sampled_early_use_the_results_before_their_weights(
    config: Path, tmp_path: Path
) -> None:
    check_decisions(train(config, tmp_path / "run", "rl.max_staleness=1"), lead=1)


def test_replacements_get_as_many_in_the_mean_and_earlier_runs_count(
    config: Path, plain: Path, tmp_path: Path
) -> None:
    earlier = f"rollout.online_budget.earlier=[{plain}]"
    out = train(config, tmp_path / "run", "rollout.dynamic_sampling=2", earlier)
    check_decisions(out, earlier_runs=(plain,))
    replaced = 0
    for update in range(1, UPDATES + 1):
        further = {p: n for p, n in counts_of(stored(out, update)).items() if p >= QUESTIONS}
        replaced += len(further)
        assert sum(further.values()) == len(further) * N_AGENT
        assert all(2 <= count <= MOST for count in further.values())
    assert replaced, "nothing was replaced"


def test_under_a_cap_the_total_shrinks_and_the_run_comes_to_its_end(
    config: Path, plain: Path, tmp_path: Path
) -> None:
    last = lines_of(plain)[-1]
    cap = f"answering.money.cap={0.7 * last['cost/generator_money']}"
    off = "rollout.online_budget.n_max=null"
    train(config, tmp_path / "equal", cap, off, "eval.eval_limit=1", code=3)
    out = train(config, tmp_path / "online", cap, "eval.eval_limit=1")
    samples = [line["samples"] for line in lines_of(out)]
    assert len(samples) == UPDATES
    assert all(2 * QUESTIONS <= count < QUESTIONS * N_AGENT for count in samples)
    left = [line["budget_money_left"] for line in lines_of(out)]
    assert left == sorted(left, reverse=True) and left[-1] > 0


def test_mistakes_are_told_before_anything_is_loaded(config: Path, tmp_path: Path) -> None:
    own_rows = learning.write_questions(tmp_path / "own.jsonl", range(6), (4, 2))
    cfg = load(config, tmp_path / "run", f"data.train={own_rows}")
    with pytest.raises(UserError, match=r"6 questions of data.train have an n_agent .*q0 first"):
        run_search(load_train(cfg), {}, cfg)
    cfg = load(config, tmp_path / "run", "rollout.online_budget.earlier=[/no/run]")
    with pytest.raises(UserError, match=r"earlier: /no/run.*no trajectories of a run"):
        run_search(load_train(cfg), {}, cfg)
    with pytest.raises(UserError, match=r"n_agent 9 is the mean .* n_min 2 to n_max 8"):
        load(config, tmp_path / "run", "rollout.n_agent=9")
    with pytest.raises(UserError, match=r"online_budget\.n_max: only training"):
        collect(load(config, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_check_tells_of_it_and_reckons_with_the_total(config: Path, tmp_path: Path) -> None:
    findings = check_run(load(config, tmp_path))
    assert not findings.failed, findings.failed
    results = {check.name: check.result for check in findings.checks}
    assert results["updates"].startswith(
        "5 of 3 questions x 4 episodes in the mean, 2 to 8 of each by the results so far, 3 steps"
    )
    assert results["money"].startswith(f"{UPDATES * QUESTIONS * N_AGENT} episodes of training")
