"""An evaluation keeps what was answered, says of how many it is, and asks again the next time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.reward_kit import reward_services, switched_service
from tests.trainer_kit import example, letter_tokenizer, tiny_llama
from trainer.config import GenerationConfig, RewardConfig
from trainer.console import Console
from trainer.evaluate import Report, evaluate_on_dataset
from trainer.services import Rewarder

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
    return RewardConfig(
        metricx_urls=[metricx], xcomet_urls=[xcomet], w_xcomet_span=0, timeout_s=2.0
    )


def evaluated(rewarder: Rewarder) -> Report:
    return evaluate_on_dataset(SOURCES, MODEL, TOKENIZER, GENERATION, rewarder, rewarder.cfg)


def console_line(report: Report, capsys: pytest.CaptureFixture[str]) -> str:
    with Console(1) as console:
        console.evaluation(0, report)
    return next(line for line in capsys.readouterr().err.splitlines() if "held out" in line)


def test_a_piece_that_fails_costs_itself_alone_and_the_next_evaluation_asks_again(
    metricx: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with switched_service("xcomet") as (switch, url):
        with closing(Rewarder(shown_xcomet(metricx, url))) as rewarder:
            switch.down = lambda body: '"src":"ca"' in body.replace(": ", ":")
            report = evaluated(rewarder)
            scored = [line["xcomet_score"] is not None for line in report.examples]
            assert scored == [True] * 16 + [False] * 16 + [True] * 8
            assert report.xcomet_coverage == 24 / 40
            assert report.metricx_coverage == report.reward_coverage == 1.0
            assert "xcomet_score" in console_line(report, capsys)
            assert "(of 60%)" in console_line(report, capsys)
            assert report.examples[16]["error"].startswith("xcomet: upstream")
            switch.down = lambda body: False
            report = evaluated(rewarder)
    assert report.xcomet_coverage == 1.0
    assert "(of" not in console_line(report, capsys)


@pytest.mark.parametrize("begins", ["away", "there"])
def test_a_service_that_is_away_for_an_evaluation_is_asked_in_the_next(
    metricx: str, begins: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it was there when the run began or not; its absence is a coverage of 0, not None."""
    with switched_service("xcomet") as (switch, url):
        switch.away = begins == "away"
        with closing(Rewarder(shown_xcomet(metricx, url))) as rewarder:
            found = []
            for away in (True, False, True, False):
                switch.away = away
                found.append(evaluated(rewarder).xcomet_coverage)
    assert found == [0.0, 1.0, 0.0, 1.0]
    assert caplog.text.count("xcomet is given up for this batch") == 2
