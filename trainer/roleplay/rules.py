"""The five rewards of role-play as rules of a reward definition, for other trainers.

    components:
      reward_format: {rule: "trainer.roleplay.rules:reward_format", batch: true, weight: 0.28}

`scorekit reward --config FILE` of a role-play config prints all five with their weights. Training
itself calls trainer/roleplay/rewards.py: TRL logs each function and sums in float32.

A sample has the reply in `mt`, the prompt in `prompt` (a text or messages) or the user turn in
`src`, and the columns of the rows under their names (`reference`, ...). The two that embed need
`configure`, or REWARD_EMBEDDING_URL and REWARD_CALIBRATION.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.roleplay import rewards
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.turn import COLUMNS

Samples = Sequence[Mapping[str, Any]]


def _rule(function: Callable[..., list[float]]) -> Callable[[Samples], list[float]]:
    def rule(samples: Samples) -> list[float]:
        prompts = [sample.get("prompt", sample["src"]) for sample in samples]
        columns = {name: [sample.get(name) for sample in samples] for name in COLUMNS}
        return function(prompts, [sample["mt"] for sample in samples], **columns)

    rule.__name__, rule.__doc__ = function.__name__, function.__doc__
    return rule


reward_format = _rule(rewards.reward_format)
reward_role_split = _rule(rewards.reward_role_split)
reward_grounded_to_user = _rule(rewards.reward_grounded_to_user)
reward_character_consistency = _rule(rewards.reward_character_consistency)
reward_reference_alignment = _rule(rewards.reward_reference_alignment)


def definition_of(cfg: RewardConfig) -> dict[str, Any]:
    """Return the five functions with their weights as a reward definition.

    Raises UserError for a wrong weight."""
    weights = zip(rewards.REWARDS, rewards.weights_of(cfg), strict=True)
    return {
        "components": {
            reward.name: {"rule": f"{__name__}:{reward.name}", "batch": True, "weight": weight}
            for reward, weight in weights
        }
    }
