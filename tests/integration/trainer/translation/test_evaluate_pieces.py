"""Check that an evaluation keeps its scores, reports its coverage, and retries the next time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kits.trainer.rewards import reward_services, switched_service
from tests.kits.trainer.runs import (
    byte_level_tokenizer,
    example,
    letter_tokenizer,
    save_policy,
    tiny_llama,
)
from trainer.runs.checkpoints.checkpoint import checkpoints, read_state
from trainer.runs.run_log import read_jsonl
from trainer.translation.config import GenerationConfig, TranslationConfig
from trainer.translation.evaluation.evaluate import Report, evaluate_on_dataset, evaluation_line
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.services import RewardClient
from trainer.translation.train import train_translation

pytestmark = pytest.mark.usefixtures("no_second_try")

TOKENIZER = letter_tokenizer()
MODEL = tiny_llama(TOKENIZER)
GENERATION = GenerationConfig(
    prompt_template="source", max_new_tokens=4, temperature=0.0, num_samples_per_prompt=1
)
LETTERS = "abcdefgh"
SOURCES = [example(a + b, a + b) for a in LETTERS[:5] for b in LETTERS]  # 40, all different


@pytest.fixture(scope="module")
def metricx() -> Iterator[str]:
    with reward_services() as running:
        yield running.urls["metricx_urls"]


def shown_xcomet(metricx: str, xcomet: str) -> RewardConfig:
    return RewardConfig(metricx_urls=[metricx], xcomet_urls=[xcomet], w_xcomet_span=0)


def evaluated(rewarder: RewardClient) -> Report:
    return evaluate_on_dataset(SOURCES, MODEL, TOKENIZER, GENERATION, rewarder, rewarder.cfg)


def test_a_piece_that_fails_costs_itself_alone_and_the_next_evaluation_asks_again(
    metricx: str,
) -> None:
    with switched_service("xcomet") as (switch, url):
        with closing(RewardClient(shown_xcomet(metricx, url))) as rewarder:
            switch.down = lambda body: '"src":"ca"' in body.replace(": ", ":")
            switch.refuses_after = 2  # the other pieces: a silent service is skipped as a whole
            report = evaluated(rewarder)
            scored = [line["xcomet_score"] is not None for line in report.examples]
            assert scored == [True] * 16 + [False] * 16 + [True] * 8
            assert report["xcomet_coverage"] == 24 / 40
            assert report["metricx_coverage"] == report.reward_coverage == 1.0
            assert "xcomet_score" in evaluation_line(0, report)
            assert "(of 60%)" in evaluation_line(0, report)
            assert report.examples[16]["error"].startswith("xcomet: upstream")
            switch.down = lambda body: False
            report = evaluated(rewarder)
    assert report["xcomet_coverage"] == 1.0
    assert "(of" not in evaluation_line(0, report)


@pytest.mark.parametrize("begins", ["away", "there"])
def test_a_service_that_is_away_for_an_evaluation_is_asked_in_the_next(
    metricx: str, begins: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Check a service that is up or down at the start of the run: a failure is coverage 0, not
    None."""
    with switched_service("xcomet") as (switch, url):
        switch.away = begins == "away"
        with closing(RewardClient(shown_xcomet(metricx, url))) as rewarder:
            coverages = []
            for away in (True, False, True, False):
                switch.away = away
                coverages.append(evaluated(rewarder)["xcomet_coverage"])
    assert coverages == [0.0, 1.0, 0.0, 1.0]
    assert caplog.text.count("xcomet is skipped for this batch") == 2


def test_a_mean_over_the_easy_part_makes_no_checkpoint_the_best(
    metricx: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the rating of the second update, where one source of 17 has no score: it has none."""
    sources = [f"Save {n}." for n in range(17)]
    with switched_service("xcomet") as (switch, url):
        cfg = TranslationConfig.model_validate(
            {
                "policy": {"path": str(save_policy(tmp_path / "policy", byte_level_tokenizer()))},
                "generation": {
                    "prompt_template": "source",
                    "max_new_tokens": 4,
                    "num_samples_per_prompt": 2,
                },
                "reward": {"metricx_urls": metricx, "xcomet_urls": url},
                "rl": {"num_updates": 3, "batch_size": 2, "lr": 0.01},
                "eval": {"eval_every_n_updates": 1},
                "misc": {
                    "threads": 1,
                    "device": "cpu",
                    "run_dir": str(tmp_path / "run"),
                    "save_every_n_updates": 1,
                    "keep_checkpoints": 3,
                },
            }
        )
        log = tmp_path / "run/log.jsonl"
        switch.down = lambda body: "Save 16." in body and len(read_jsonl(log)) == 2
        run = train_translation(
            [example("Open."), example("Close.")], list(map(example, sources)), cfg
        )
    ratings = [(u, r.reward_coverage, r.rating == r.reward_mean) for u, r in run.reports]
    assert ratings == [(0, 1.0, True), (1, 1.0, True), (2, 16 / 17, False), (3, 1.0, True)]
    reports = dict(run.reports)
    assert reports[2].rating is None
    states = {
        read_state(path).update: read_state(path)
        for path in checkpoints(run.run_dir / "checkpoints")
    }
    assert {update: state.reward for update, state in states.items()} == {
        1: reports[1].reward_mean,
        2: None,
        3: reports[3].reward_mean,
    }
    assert "step 2 cannot be the best checkpoint: its evaluation scored 94 %" in caplog.text
