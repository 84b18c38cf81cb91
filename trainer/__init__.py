"""Training with rewards from scoring services: three trainers that share runs and checkpoints.

translation: a translation policy, by token-level PPO. roleplay: a role-play policy, by GRPO on TRL.
search: a multi-turn searcher, by GRPO or GSPO. They share run directories, checkpoints, logs and
the clients of reward services, which a config names by URL. sft fine-tunes a policy before RL.

The names below can be imported from here. Nothing is loaded before one of them is used, so that
`import trainer` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scorekit.credit import DecodeConfig as DecodeConfig
    from scorekit.credit import compute_token_char_offsets as compute_token_char_offsets
    from scorekit.credit import spans_to_token_rewards as spans_to_token_rewards
    from scorekit.scorers import RewardOutput as RewardOutput
    from scorekit.scorers import SampleForScoring as SampleForScoring
    from scorekit.scorers import ScoringConfig as ScoringConfig
    from trainer.rl.advantage import TokenAdvantages as TokenAdvantages
    from trainer.rl.config import RLConfig as RLConfig
    from trainer.rl.update import TrainStats as TrainStats
    from trainer.rl.update import update_policy as update_policy
    from trainer.roleplay.rewards import (
        reward_character_consistency as reward_character_consistency,
    )
    from trainer.roleplay.rewards import reward_format as reward_format
    from trainer.roleplay.rewards import reward_grounded_to_user as reward_grounded_to_user
    from trainer.roleplay.rewards import reward_reference_alignment as reward_reference_alignment
    from trainer.roleplay.rewards import reward_role_split as reward_role_split
    from trainer.runs.artifacts import Artifacts as Artifacts
    from trainer.translation.config import GenerationConfig as GenerationConfig
    from trainer.translation.config import TranslationConfig as TranslationConfig
    from trainer.translation.data import Example as Example
    from trainer.translation.data import format_translation_prompt as format_translation_prompt
    from trainer.translation.data import load_examples as load_examples
    from trainer.translation.data import postprocess_translation as postprocess_translation
    from trainer.translation.evaluation.evaluate import Report as Report
    from trainer.translation.evaluation.evaluate import evaluate_on_dataset as evaluate_on_dataset
    from trainer.translation.rewards import metricx_reward as metricx_reward
    from trainer.translation.rewards.config import RewardConfig as RewardConfig
    from trainer.translation.rewards.sample_reward import rollout_advantages as rollout_advantages
    from trainer.translation.rewards.services import RewardClient as RewardClient
    from trainer.translation.rollouts import TranslationRollout as Rollout  # noqa: F401
    from trainer.translation.rollouts import generate_rollouts as generate_rollouts
    from trainer.translation.train import run_toy_rl as run_toy_rl
    from trainer.translation.train import train_translation as train_translation

#: Each public name, and where it is defined: a module, or module:name where the names differ.
_SOURCES = {
    "Artifacts": "trainer.runs.artifacts",
    "DecodeConfig": "scorekit.credit",
    "Example": "trainer.translation.data",
    "GenerationConfig": "trainer.translation.config",
    "RLConfig": "trainer.rl.config",
    "Report": "trainer.translation.evaluation.evaluate",
    "RewardClient": "trainer.translation.rewards.services",
    "RewardConfig": "trainer.translation.rewards.config",
    "RewardOutput": "scorekit.scorers",
    "Rollout": "trainer.translation.rollouts:TranslationRollout",
    "SampleForScoring": "scorekit.scorers",
    "ScoringConfig": "scorekit.scorers",
    "TokenAdvantages": "trainer.rl.advantage",
    "TrainStats": "trainer.rl.update",
    "TranslationConfig": "trainer.translation.config",
    "compute_token_char_offsets": "scorekit.credit",
    "evaluate_on_dataset": "trainer.translation.evaluation.evaluate",
    "format_translation_prompt": "trainer.translation.data",
    "generate_rollouts": "trainer.translation.rollouts",
    "load_examples": "trainer.translation.data",
    "metricx_reward": "trainer.translation.rewards",
    "postprocess_translation": "trainer.translation.data",
    "reward_character_consistency": "trainer.roleplay.rewards",
    "reward_format": "trainer.roleplay.rewards",
    "reward_grounded_to_user": "trainer.roleplay.rewards",
    "reward_reference_alignment": "trainer.roleplay.rewards",
    "reward_role_split": "trainer.roleplay.rewards",
    "rollout_advantages": "trainer.translation.rewards.sample_reward",
    "run_toy_rl": "trainer.translation.train",
    "spans_to_token_rewards": "scorekit.credit",
    "train_translation": "trainer.translation.train",
    "update_policy": "trainer.rl.update",
}
__all__ = list(_SOURCES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first (PEP 562)."""
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, source_name = _SOURCES[name].partition(":")
    value = getattr(import_module(module), source_name or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SOURCES})
