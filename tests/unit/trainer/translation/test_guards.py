"""Check that guards return values near 1 for reward hacking, near 0 for good translations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.rewards.violations import VIOLATIONS, length_violation
from scorekit.text.checks import length_band, length_ratio
from tests.kits.trainer.runs import rollout
from trainer.translation.evaluation.stats import reward_stats
from trainer.translation.rewards.config import GuardConfig, RewardConfig
from trainer.translation.rewards.reward_batch import Scores
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.screening import check_guards
from trainer.translation.rewards.short_form import weighted_parts

SRC = "Please save all of your changes before you close the window, or they will be lost."
MT = "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 사라집니다."
JAPANESE = "ウィンドウを閉じる前に変更をすべて保存しないと、変更した内容がすべて失われます。"


def reward_guard_values(mt: str, src: str = SRC, pair: str = "en-US>ko-KR") -> dict[str, float]:
    return {name: compute(src, mt, *pair.split(">")) for name, compute in VIOLATIONS.items()}


def test_a_good_translation_has_no_fault() -> None:
    assert reward_guard_values(MT) == pytest.approx(dict.fromkeys(VIOLATIONS, 0.0), abs=1e-3)


@pytest.mark.parametrize(
    ("mt", "expected_guards"),
    [
        (SRC, {"language", "script", "copy"}),
        (JAPANESE, {"language", "script"}),
        ("", {"length"}),
        (MT * 12, {"length", "repetition"}),
    ],
)
def test_each_guard_finds_its_own_fault_and_no_other(mt: str, expected_guards: set[str]) -> None:
    values = reward_guard_values(mt)
    assert {name for name, guard_value in values.items() if guard_value > 0.9} == expected_guards
    assert all(values[name] < 0.1 for name in values.keys() - expected_guards)


def test_the_fault_of_a_language_is_1_minus_its_probability() -> None:
    """Check a text that is likelier in a third language, too."""
    german = "Bitte speichern Sie alle Änderungen, bevor Sie das Fenster schließen."
    assert reward_guard_values(german, pair="en>de")["language"] < 0.01
    assert reward_guard_values(german, pair="en>fr")["language"] > 0.99
    assert reward_guard_values(german, pair="en>ko")["language"] > 0.99


def test_the_identifier_is_believed_in_proportion_to_a_short_text() -> None:
    assert reward_guard_values("save the file", pair="en>de")["language"] <= 11 / 40
    assert reward_guard_values("save the file " * 4, pair="en>de")["language"] > 0.9


def test_names_code_links_and_numbers_are_no_fault() -> None:
    src = "Run `pip install torch` as described at https://example.org/long/path in 2024, PyTorch."
    mt = "2024년 https://example.org/long/path 설명대로 PyTorch: `pip install torch` 실행"
    assert reward_guard_values(mt, src) == dict.fromkeys(VIOLATIONS, 0.0)
    bare = reward_guard_values("`pip install torch` https://example.org/long/path 2024", src)
    assert (bare["language"], bare["script"], bare["copy"]) == (0, 0, 0)


def test_the_length_fault_is_0_in_the_band_and_1_at_twice_or_half_of_it() -> None:
    min_ratio, max_ratio = length_band(SRC, "en", "ko")
    size = len(SRC)
    inside, double_size, half = (int(size * r) for r in (max_ratio, 2 * max_ratio, min_ratio / 2))
    assert length_violation(SRC, "a" * inside, "en", "ko") == 0
    assert length_violation(SRC, "a" * (double_size + 1), "en", "ko") == 1
    assert length_violation(SRC, "a" * half, "en", "ko") == 1
    assert 0.4 < length_violation(SRC, "a" * int(size * max_ratio * 1.414), "en", "ko") < 0.6
    assert length_violation("", "", "en", "ko") == 0
    assert length_violation("", "가", "en", "ko") == 1


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_the_length_fault_grows_outside_the_band(first: int, second: int) -> None:
    middle = sum(length_band(SRC, "en", "ko")) / 2
    texts = ["a" * first, "a" * second]
    near, far = sorted(length_violation(SRC, text, "en", "ko") for text in texts)
    ratios = [length_ratio(SRC, text) for text in texts]
    if (ratios[0] > middle) == (ratios[1] > middle):
        outer = max(texts, key=len) if ratios[0] > middle else min(texts, key=len)
        assert length_violation(SRC, outer, "en", "ko") == far
    assert 0 <= near <= far <= 1


@given(st.text(max_size=80), st.text(max_size=80), st.sampled_from(["ko", "de", "ja", "xx"]))
@example("\ud800", "\ud800\x00", "ko")
def test_every_fault_is_between_0_and_1(src: str, mt: str, tgt_lang: str) -> None:
    values = reward_guard_values(mt, src, f"en>{tgt_lang}")
    assert values.keys() == VIOLATIONS.keys()
    assert all(0 <= guard_value <= 1 for guard_value in values.values())


def test_true_translations_have_few_faults() -> None:
    path = Path(__file__).parents[4] / "demo/data/heldout.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    values_by_row = [reward_guard_values(row["ref_text"], row["src_text"]) for row in rows]
    means = {
        name: sum(row_values[name] for row_values in values_by_row) / len(values_by_row)
        for name in VIOLATIONS
    }
    assert all(mean < 0.02 for mean in means.values()), means


# -- in the reward ---------------------------------------------------------------------------------


def reward_of(mt: str, **guards: Any) -> Any:
    cfg = RewardConfig(w_metricx=0, w_xcomet_span=0, guards=GuardConfig(**guards))
    sampled = rollout([1], [5, 6], mt, src_text=SRC, pair="en-US>ko-KR")
    (reward,) = compute_rewards([sampled], Scores(), cfg)
    return reward, reward_stats([reward], cfg)


def test_guards_are_off_by_default() -> None:
    reward, stats = reward_of(SRC)
    assert reward.r_seq == 0 and reward.values == {}
    assert [stats[f"guard_{name}_mean"] for name in VIOLATIONS] == [None] * len(VIOLATIONS)
    assert not weighted_parts(RewardConfig(w_metricx=0, w_xcomet_span=0))


def test_a_guard_takes_its_weight_times_its_fault() -> None:
    reward, stats = reward_of(SRC, w_copy=3.0, w_script=0.5)
    assert reward.values == {"guard_script": 1.0, "guard_copy": 1.0}
    assert reward.r_seq == pytest.approx(-3.5)
    assert (stats["guard_copy_mean"], stats["guard_language_mean"]) == (1.0, None)
    cfg = RewardConfig(guards=GuardConfig(w_copy=3.0), w_metricx=0, w_xcomet_span=0)
    assert weighted_parts(cfg) == {"guards": 3.0}


def test_shown_guards_cost_nothing() -> None:
    reward, stats = reward_of(SRC, shown=True)
    assert reward.r_seq == 0
    assert reward.values.keys() == {f"guard_{name}" for name in VIOLATIONS}
    assert stats["guard_language_mean"] > 0.9


def test_a_guard_that_could_find_nothing_is_a_mistake() -> None:
    check_guards([("en", "ko"), ("xx", "de")], GuardConfig(w_language=1, w_script=1))
    check_guards([("en", "tlh")], GuardConfig(w_copy=1, w_length=1, w_repetition=1))
    for guard in ("language", "script"):
        with pytest.raises(UserError, match=f"w_{guard}: .* 'tlh'"):
            check_guards([("en", "ko"), ("en", "tlh")], GuardConfig(**{f"w_{guard}": 1.0}))
