"""Check episode rewards: presets, gate, forced ends and unjudged answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config, save_config
from scorekit.errors import UserError
from tests.kits.trainer.searching.finished import complete_turn, episode, question, search_turn
from trainer.search.config import SearchRewardConfig
from trainer.search.records import EpisodeReward, GeneratedAnswer, JudgedAnswer, Trajectory, Turn
from trainer.search.reward import format_error, skip_reward, with_reward

SECOND = 0.6309297535714575  # NDCG of a gold page that is displayed second


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RM_JUDGE_COEF", "RM_NDCG_COEF", "RM_FORMAT_COEF"):
        monkeypatch.delenv(name, raising=False)


def cfg(preset: str = "phase2", **more: Any) -> SearchRewardConfig:
    return SearchRewardConfig(preset=preset, **more)  # type: ignore[arg-type]


def judged(score: float | None = 0.5, *, status: Any = "ok", **more: Any) -> Trajectory:
    sample = episode(**more)
    sample.answer = GeneratedAnswer(status="ok", text="42")
    sample.judged = JudgedAnswer(status=status, score=score, reason="as it said")
    return sample


def invalid(number: int) -> Turn:
    return Turn(number=number, text="hello", action="invalid", reason="no_think")


def ill_formed(**more: Any) -> Trajectory:
    return judged(turns=[search_turn(1, "deck_2"), invalid(2), complete_turn(3)], **more)


def reward(sample: Trajectory, settings: SearchRewardConfig) -> EpisodeReward:
    value = with_reward(sample, settings).reward
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("preset", "value"),
    [
        ("phase1", 0.1 + 0.9 * SECOND),
        ("phase2", 0.8 * 0.5 + 0.2 * SECOND),
        ("focused", 0.5),
        ("unified", 0.4 * 0.5 + 0.5 * SECOND + 0.1),
    ],
)
def test_presets(preset: str, value: float) -> None:
    result = reward(judged(), cfg(preset))
    assert (result.status, result.value, result.gated) == ("ok", pytest.approx(value), False)
    assert result.parts == {"judge": 0.5, "ndcg": pytest.approx(SECOND), "format": 1.0}
    assert with_reward(judged(), cfg(preset)).ndcg == pytest.approx(SECOND)


@pytest.mark.parametrize(("preset", "gated"), [("phase1", True), ("unified", True)])
def test_the_gate_of_a_preset_makes_a_wrong_form_earn_nothing(preset: str, gated: bool) -> None:
    result = reward(ill_formed(), cfg(preset))
    assert (result.value, result.gated, result.parts["format"]) == (0.0, gated, 0.0)


def test_without_a_gate_a_wrong_form_is_only_told() -> None:
    result = reward(ill_formed(), cfg("phase2"))
    assert result.value == pytest.approx(0.8 * 0.5 + 0.2)
    assert not result.gated
    assert reward(ill_formed(), cfg("unified", gate=False)).value == pytest.approx(0.2 + 0.5)
    assert reward(ill_formed(), cfg("focused", gate=True)).value == 0.0


def test_every_turn_is_checked_the_first_included() -> None:
    for index in range(3):
        turns = [search_turn(1, "deck_1"), search_turn(2, "deck_2"), complete_turn(3)]
        turns[index] = invalid(index + 1)
        assert format_error(episode(turns=turns)) == f"turn {index + 1}: no_think"
    assert format_error(episode()) is None
    assert format_error(episode(turns=[])) == "no turn"
    behind = [complete_turn(1), search_turn(2, "deck_2")]
    assert format_error(episode(turns=behind)) == "turn 1: the episode went on behind its end"


@pytest.mark.parametrize("end", ["forced", "context"])
def test_an_end_that_was_not_chosen_is_no_fault_of_form(end: str) -> None:
    sample = judged(end=end)
    assert format_error(sample) is None
    assert not reward(sample, cfg("unified")).gated


@pytest.mark.parametrize("end", ["forced", "context"])
def test_what_an_end_that_was_not_chosen_earns(end: str) -> None:
    sample, full = judged(end=end), 0.8 * 0.5 + 0.2 * SECOND
    assert reward(sample, cfg(forced_completion="score")).value == pytest.approx(full)
    assert reward(sample, cfg(forced_completion="zero")).value == 0.0
    less = cfg(forced_completion="penalty", forced_penalty=0.25)
    assert reward(sample, less).value == pytest.approx(full - 0.25)
    assert reward(judged(), less).value == pytest.approx(full)


@pytest.mark.parametrize(
    ("preset", "deduction"),
    [("phase1", None), ("unified", None), ("phase2", 0.1), ("focused", 0.1)],
)
def test_each_preset_makes_a_forced_end_worse_than_a_chosen_one(
    preset: str, deduction: float | None
) -> None:
    """Check the deduction; None: everything."""
    full = reward(judged(), cfg(preset)).value
    assert full is not None and full > 0.1
    forced = reward(judged(end="forced"), cfg(preset)).value
    assert forced == pytest.approx(0.0 if deduction is None else full - deduction)
    scored = cfg(preset, forced_completion="score")
    assert reward(judged(end="forced"), scored).value == pytest.approx(full)


def test_a_saved_config_keeps_what_a_forced_end_earned() -> None:
    assert cfg("phase1").model_dump()["forced_completion"] == "zero"
    saved = cfg("phase1").model_dump() | {"forced_completion": "score"}  # before presets had it
    assert SearchRewardConfig.model_validate(saved).forced_completion == "score"


@pytest.mark.parametrize("status", ["failed", "late"])
def test_what_was_not_judged_is_no_number(status: str) -> None:
    result = reward(judged(None, status=status), cfg())
    assert (result.status, result.value, result.error) == (status, None, "as it said")
    assert result.parts == {"ndcg": pytest.approx(SECOND), "format": 1.0}
    unanswered = episode(answer=GeneratedAnswer(status=status, error="overloaded: 429"))  # type: ignore[arg-type]
    result = reward(unanswered, cfg())
    assert (result.status, result.value, result.error) == (status, None, "overloaded: 429")
    assert reward(episode(), cfg()).status == "failed"


def test_who_failed_is_named_where_it_was_asked() -> None:
    answer = GeneratedAnswer(status="failed", error="unreachable: HTTP 503", model="g")
    unjudged = JudgedAnswer(status="failed", reason="no answer to judge", model="j")
    result = reward(episode(answer=answer, judged=unjudged), cfg())
    assert result.error == "generator: unreachable: HTTP 503"
    answer = GeneratedAnswer(status="ok", text="42", model="g")
    unjudged = JudgedAnswer(status="failed", reason="unreachable", model="j")
    assert reward(episode(answer=answer, judged=unjudged), cfg()).error == "judge: unreachable"
    skipped = JudgedAnswer(status="skipped", reason="no reference answer", model="j")
    assert reward(episode(answer=answer, judged=skipped), cfg()).error == "no reference answer"


def test_a_judge_that_has_no_weight_is_not_missed() -> None:
    result = reward(judged(None, status="failed"), cfg("phase1"))
    assert (result.status, result.value) == ("ok", pytest.approx(0.1 + 0.9 * SECOND))


def test_no_evidence_is_judged_zero_and_that_is_a_number() -> None:
    sample = judged(0.0, status="skipped", shown=())
    assert reward(sample, cfg("focused")) == EpisodeReward(
        status="ok", value=0.0, parts={"judge": 0.0, "ndcg": 0.0, "format": 1.0}
    )


def test_a_question_without_gold_pages_has_no_ndcg_reward() -> None:
    sample = judged(question=question(gold=()))
    assert with_reward(sample, cfg("focused")).ndcg is None
    assert reward(sample, cfg("focused")).value == 0.5
    missing = reward(sample, cfg("phase2"))
    assert (missing.status, missing.value) == ("failed", None)


def test_a_neighbour_that_failed_fails_the_episode() -> None:
    sample = episode(end="failed", end_detail="the retriever is away")
    for preset in ("phase1", "phase2"):
        assert reward(sample, cfg(preset)) == EpisodeReward(
            status="failed", error="the retriever is away"
        )
    assert reward(episode(end=None), cfg()).status == "failed"


@pytest.mark.parametrize(
    ("sample", "settings", "reason"),
    [
        (episode(), cfg("phase1"), "the judge has no weight"),
        (ill_formed(), cfg("unified"), "not well-formed: turn 2: no_think"),
        (episode(end="forced"), cfg(forced_completion="zero"), "its end was forced"),
        (episode(end="declined"), cfg(), "the search was given up"),
        (episode(end="failed", end_detail="away"), cfg(), "away"),
        (episode(question=question(gold=())), cfg(), "the question names no gold page"),
    ],
)
def test_nothing_is_paid_for_where_no_answer_is_needed(
    sample: Trajectory, settings: SearchRewardConfig, reason: str
) -> None:
    skipped = skip_reward(sample, settings)
    assert skipped is not None and skipped.answer and skipped.judged
    assert (skipped.answer.status, skipped.answer.error) == ("skipped", reason)
    assert (skipped.judged.status, skipped.judged.reason) == ("skipped", reason)


def test_who_is_to_be_judged_is_asked_for() -> None:
    for sample in (episode(), episode(end="forced"), episode(end="context"), ill_formed()):
        assert skip_reward(sample, cfg("phase2")) is None


def test_who_gives_the_search_up_is_judged_zero_without_a_call() -> None:
    given_up = skip_reward(episode(end="declined"), cfg())
    assert given_up
    assert reward(given_up, cfg()).value == pytest.approx(0.2 * SECOND)
    unjudged = skip_reward(episode(end="declined"), cfg("phase1"))
    assert unjudged and unjudged.judged and unjudged.judged.score is None


def test_weights_are_the_configs_else_the_environments_else_the_presets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cfg("phase2").weights == {"judge": 0.8, "ndcg": 0.2, "format": 0.0}
    monkeypatch.setenv("RM_JUDGE_COEF", "1.0")
    monkeypatch.setenv("RM_NDCG_COEF", "0.0")
    assert cfg("phase2").weights == {"judge": 1.0, "ndcg": 0.0, "format": 0.0}
    assert cfg("phase2", w_ndcg=0.3).weights == {"judge": 1.0, "ndcg": 0.3, "format": 0.0}
    monkeypatch.setenv("RM_FORMAT_COEF", "0.1")
    assert cfg("phase2").gate is True
    monkeypatch.setenv("RM_FORMAT_COEF", " ")
    assert cfg("phase2").gate is False


@pytest.mark.parametrize("wrong", ["much", "-1", "nan", "inf"])
def test_a_wrong_weight_in_the_environment_is_named(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_JUDGE_COEF", wrong)
    with pytest.raises(UserError, match="environment variable RM_JUDGE_COEF: expected a number"):
        load_config(SearchRewardConfig)


def test_a_saved_config_no_longer_asks_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_JUDGE_COEF", "0.7")
    save_config(cfg("unified"), tmp_path / "config.yaml")
    monkeypatch.setenv("RM_JUDGE_COEF", "0.1")
    assert load_config(SearchRewardConfig, tmp_path / "config.yaml").weights["judge"] == 0.7


def test_no_weight_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="all weights are 0"):
        load_config(SearchRewardConfig, None, ["w_judge=0", "w_ndcg=0", "w_format=0"])
