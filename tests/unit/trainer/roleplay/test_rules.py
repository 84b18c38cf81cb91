"""Check that the five functions give, as rules of a definition, what they give TRL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scorekit.rewards import SyncCompositeReward, load_definition
from tests.unit.trainer.roleplay.test_rewards import GOOD, letter_similarity
from trainer.roleplay import rewards
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import REWARDS, configure
from trainer.roleplay.rules import definition_of
from trainer.roleplay.similarity import Similarity

TURN = "오늘은 언제까지 있어?"
REPLIES = [GOOD, '민수는 웃었다.\n"가."', "user: 안녕", "", '"늦게까지."\n유나가 말했다.']
ROWS = [
    {"reference": GOOD, "player_name": "민수", "character_name": "유나", "speech_level": level}
    for level in ("polite", "plain", None, "polite", "plain")
]
WEIGHTS = {"reward_format": 0.5, "reward_role_split": 0.0}


@pytest.fixture
def similarity(monkeypatch: pytest.MonkeyPatch) -> Iterator[Similarity]:
    monkeypatch.setattr(rewards, "_setting", None)
    letters = letter_similarity()
    configure(RewardConfig(), letters)
    yield letters


def test_the_values_and_the_weighted_sum_are_those_of_the_functions(similarity: Similarity) -> None:
    cfg = RewardConfig(weights=WEIGHTS)
    definition = load_definition(definition_of(cfg))
    assert list(definition.components) == [reward.name for reward in REWARDS]
    messages = [{"role": "user", "content": TURN}]
    samples = [
        row | {"src": TURN, "prompt": messages, "mt": reply}
        for row, reply in zip(ROWS, REPLIES, strict=True)
    ]
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    expected = {
        reward.name: reward.function([messages] * len(REPLIES), REPLIES, **columns)
        for reward in REWARDS
    }
    with SyncCompositeReward(definition) as reward:
        results = reward.score(samples)
    weights = rewards.weights_of(cfg)
    for index, result in enumerate(results):
        values = [part.raw for part in result.components.values()]
        assert values == [expected[name][index] for name in definition.components]
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        assert result.reward == pytest.approx(total, rel=0, abs=1e-12)
    assert len({result.reward for result in results}) == len(REPLIES)


def test_the_user_turn_may_be_the_source_and_a_call_is_one_request(similarity: Similarity) -> None:
    definition = definition_of(RewardConfig())
    name = "reward_grounded_to_user"
    definition["components"] = {name: definition["components"][name]}
    samples = [{"src": TURN, "mt": reply} | ROWS[0] for reply in (GOOD, "가요", TURN)]
    expected = rewards.reward_grounded_to_user([TURN] * 3, [sample["mt"] for sample in samples])
    similarity.embedder.calls.clear()
    similarity._vectors.clear()
    with SyncCompositeReward(definition) as reward:
        results = reward.score(samples)
    assert [result.components[name].raw for result in results] == expected
    assert len(set(expected)) == 3 and len(similarity.embedder.calls) == 1
