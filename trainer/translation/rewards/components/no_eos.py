"""The penalty of completions that max_new_tokens truncated."""

from __future__ import annotations

from trainer.translation.rewards.component import RewardComponent
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout


class NoEOS(RewardComponent):
    """Component: -no_eos_penalty for truncated completions."""

    name = "no_eos"
    weight_key = "no_eos_penalty"

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Subtract the penalty if the completion has no end."""
        if reward.r_seq is not None and rollout.finish_reason == "length":
            reward.r_seq -= cfg.no_eos_penalty
