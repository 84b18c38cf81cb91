"""The reward functions return the values in the table of docs/explanation/roleplay-rewards.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.roleplay import rewards
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import (
    REWARDS,
    configure,
    reward_character_consistency,
    reward_format,
    reward_role_split,
    weights_of,
)

DOCUMENT = Path(__file__).parents[4] / "docs/explanation/roleplay-rewards.md"
ROW = {"player_name": ["민수"], "character_name": ["유나"], "speech_level": ["polite"]}
THREE = (reward_format, reward_role_split, reward_character_consistency)
_PROMPT = [[{"role": "user", "content": "오늘은 언제 가?"}]]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(rewards, "_setting", None)


def _cases():
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("<!-- cases")[2].partition("<!-- end of cases")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            cells = line.replace("\\|", "\0").split("|")[1:-1]
            reply = cells[0].strip().strip("`").replace("⏎", "\n").replace("\0", "|")
            yield reply, tuple(float(cell) for cell in cells[1:4])


def _values(reply, **row):
    return tuple(f(_PROMPT, [reply], **(ROW | row))[0] for f in THREE)


@pytest.mark.parametrize(("reply", "values"), _cases(), ids=lambda parameter: str(parameter)[:30])
def test_the_documented_cases_hold(reply, values):
    assert _values(reply) == pytest.approx(values)
    message = [{"role": "assistant", "content": reply}]
    assert _values(message) == pytest.approx(values)


def test_the_table_has_the_cases():
    assert len(list(_cases())) > 30


def test_corner_quotes_count_where_a_setting_says_so():
    configure(RewardConfig(corner_quotes=True), None)
    assert _values("유나는 웃었다.\n「가요.」") == (1, 1, 1)
    assert _values("유나는 『어린 왕자』를 덮었다.\n「가요.」")[0] == 0.3


def test_the_literal_rule_knows_no_clauses():
    configure(RewardConfig(player_name_rule="literal"), None)
    assert _values('유나는 민수가 건넨 컵을 받았다.\n"가요."')[1] == pytest.approx(0.55)
    assert _values('유나는 민수를 보았다.\n"민수는 괜찮아요?"')[1] == pytest.approx(0.55)
    for particle in ["를", "에게", "한테", "와", "의", "마저", "만이", "까지", "보다", "로부터"]:
        assert _values(f'유나는 웃었다.\n"민수{particle} 그래요."')[1] == pytest.approx(0.55)
    for call in ("민수야,", "민수 씨,", "민수예요.", "민수"):
        assert _values(f'유나는 웃었다.\n"{call} 가요."')[1] == 1


def test_what_the_row_does_not_tell_is_neutral():
    reply = '유나는 웃었다.\n"가자."'
    assert _values(reply, speech_level=[None])[2] == 0.75
    assert _values(reply, character_name=[None])[2] == 0.25
    assert reward_character_consistency(_PROMPT, [reply]) == [0.5]
    assert reward_role_split(_PROMPT, ["유나는 웃었다. 민수는 울었다."]) == [1]


def test_functions_and_weights_are_those_of_the_specification_in_its_order():
    assert [(reward.name, reward.weight) for reward in REWARDS] == [
        ("reward_format", 0.28),
        ("reward_role_split", 0.18),
        ("reward_grounded_to_user", 0.14),
        ("reward_character_consistency", 0.16),
        ("reward_reference_alignment", 0.24),
    ]
    assert sum(reward.weight for reward in REWARDS) == pytest.approx(1)
    assert weights_of(RewardConfig()) == [reward.weight for reward in REWARDS]
    assert len({reward.short for reward in REWARDS}) == len(REWARDS)
    keys = [component.key for reward in REWARDS for component in reward.components]
    assert len(set(keys)) == len(keys)
