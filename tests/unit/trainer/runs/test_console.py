"""Check what the terminal displays for an update."""

from __future__ import annotations

import pytest

from trainer.runs.console import Console
from trainer.translation.evaluation.evaluate import columns
from trainer.translation.rewards.config import RewardConfig

#: The stats that must be visible for each update.
EXPECTED_NAMES = (
    "completion_length_mean",
    "metricx_score_mean",
    "metricx_score_std",
    "metricx_reward_mean",
    "metricx_reward_std",
    "xcomet_score_mean",
    "xcomet_score_std",
    "token_rewards_mean",
    "token_rewards_std",
    "token_rewards_nonzero_frac",
    "spans_MINOR_mean",
    "spans_MAJOR_mean",
    "spans_CRITICAL_mean",
    "A_raw_mean",
    "A_raw_std",
    "A_norm_mean",
    "A_norm_std",
    "policy_loss",
    "approx_kl",
    "clip_frac",
    "kl_ref",
)


def displayed_lines(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    *,
    verbose: bool = False,
) -> list[list[str]]:
    """Return the words of each line of an update with the values 1.5, 2.5, ... in order."""
    monkeypatch.setenv("COLUMNS", str(width))
    line = {name: index + 1.5 for index, name in enumerate(EXPECTED_NAMES)}
    line |= {"update": 7, "samples": 8, "r_seq_mean": None}
    line |= dict.fromkeys(("rollout_s", "logprob_s", "reward_s", "update_s"), 0.1)
    with Console(*columns(RewardConfig()), 9, verbose=verbose) as console:
        console.update(line)
    lines = capsys.readouterr().err.splitlines()
    return [line.split() for line in lines if "training" not in line and line.strip()]


def numbers_in(words: list[str]) -> set[float]:
    return {float(word) for word in words if word[:1].isdigit()}


ALL_NUMBERS = {index + 1.5 for index in range(len(EXPECTED_NAMES))}


def test_a_wide_terminal_shows_every_figure_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles, values = displayed_lines(capsys, monkeypatch, 400)
    assert numbers_in(values) >= ALL_NUMBERS
    assert "approx_kl" in titles and "A_norm" in titles and "minor" in titles


def test_a_narrow_one_shows_a_few_unless_all_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles, values = displayed_lines(capsys, monkeypatch, 100)
    assert titles[:4] == ["update", "r_seq", "cover", "metricx"] and "A_norm" not in titles
    assert values[:2] == ["7", "-"] and not numbers_in(values) >= ALL_NUMBERS
    lines = displayed_lines(capsys, monkeypatch, 100, verbose=True)
    assert len(lines) > 2 and len(lines) % 2 == 0  # titles once, values on as many lines
    assert numbers_in([word for line in lines for word in line]) >= ALL_NUMBERS


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_titles_stand_over_their_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    line = dict.fromkeys(EXPECTED_NAMES, 1.0) | {"update": 1, "samples": 1}
    line |= dict.fromkeys(("rollout_s", "logprob_s", "reward_s", "update_s"), 0.1)
    with Console(*columns(RewardConfig()), 9, verbose=True) as console:
        console.update(line)
    err = capsys.readouterr().err.splitlines()
    lines = [text for text in err if "training" not in text and text.strip()]
    half = len(lines) // 2
    assert all(len(text) <= width for text in lines)
    for title, values in zip(lines[:half], lines[half:], strict=True):
        assert len(title) == len(values)
