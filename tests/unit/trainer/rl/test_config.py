"""Check the settings of the importance correction: defaults, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.rl.config import RLConfig
from trainer.rl.ratios import ImportanceCorrection


def config(**settings: Any) -> RLConfig:
    return RLConfig.model_validate(settings)


def test_the_defaults_of_each_algorithm() -> None:
    assert config().correction == ImportanceCorrection("token_truncate", 2.0, 0.5, 20.0)
    for algorithm, mode in (
        ("ppo", "token_truncate"),
        ("reinforce", "token_truncate"),
        ("gspo", "sequence_truncate"),
    ):
        cfg = config(algorithm=algorithm)
        assert cfg.importance_mode == mode
        assert RLConfig.model_validate(cfg.model_dump()) == cfg  # as a resumed run reads it


def test_the_lower_bound_of_a_mask_is_the_inverse_of_the_upper_one_unless_it_is_named() -> None:
    assert config(importance_mode="token_mask", importance_cap=4).correction.floor == 0.25
    named = config(importance_mode="token_mask", importance_floor=0.1, importance_cap=4)
    assert named.correction == ImportanceCorrection("token_mask", 4.0, 0.1, 20.0)
    assert config(importance_mode="sequence_mask", importance_floor=0).correction.floor == 0
    only_one = config(importance_mode="token_mask", importance_floor=1, importance_cap=1)
    assert (only_one.correction.floor, only_one.correction.cap) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"importance_floor": 0.5},
            "importance_floor 0.5: token_truncate has no lower bound. Set importance_mode to "
            "token_mask",
        ),
        (
            {"algorithm": "gspo", "importance_floor": 0.5},
            "Set importance_mode to sequence_mask",
        ),
        (
            {"importance_mode": "token_mask", "importance_cap": 0.9},
            "importance_cap 0.9: token_mask would mask every sample of the current policy",
        ),
        (
            {"importance_mode": "sequence_mask", "importance_correction": "off"},
            "importance_mode sequence_mask: importance_correction is off",
        ),
        (
            {"importance_mode": "sequence_truncate", "importance_correction": "off"},
            "importance_mode sequence_truncate: importance_correction is off",
        ),
        (
            {"algorithm": "gspo", "importance_mode": "token_mask"},
            "importance_mode token_mask: gspo weighs all tokens of a sequence the same. Set "
            "sequence_mask",
        ),
        (
            {"algorithm": "gspo", "importance_mode": "token_truncate"},
            "Set sequence_truncate, or another algorithm",
        ),
        ({"importance_mode": "token"}, "importance_mode"),
        ({"importance_mode": "token_mask", "importance_floor": 1.5}, "importance_floor"),
        (
            {"max_staleness": 3, "importance_correction": "off"},
            "importance_correction off: with max_staleness 3 older weights sample",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as error:
        config(**settings)
    assert len(error.value.errors()) == 1
    assert message in str(error.value)


def test_what_does_not_contradict_is_accepted() -> None:
    config(importance_correction="off", importance_mode="token_truncate")
    config(importance_correction="off", algorithm="gspo")
    config(importance_cap=0.5)
    config(max_staleness=3, importance_correction="on", importance_mode="sequence_truncate")
