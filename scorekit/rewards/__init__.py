"""Composite rewards: one definition for our trainers and for every adapter.

Users import them from here. Nothing here imports torch, numpy, transformers or openai.
"""

from scorekit.rewards.definition import RewardDefinition, load_definition
from scorekit.rewards.engine import CompositeReward, SyncCompositeReward
from scorekit.rewards.results import ComponentResult, GateResult, RewardResult, raise_for_missing
from scorekit.rewards.tokens import TokenRewards, token_rewards

__all__ = [
    "ComponentResult",
    "CompositeReward",
    "GateResult",
    "RewardDefinition",
    "RewardResult",
    "SyncCompositeReward",
    "TokenRewards",
    "load_definition",
    "raise_for_missing",
    "token_rewards",
]
