"""A reward function for verl.

    custom_reward_function.path=.../scorekit/adapters/verl.py
    custom_reward_function.name=compute_score
    +custom_reward_function.reward_kwargs.url=http://127.0.0.1:8001

The reward manager `batch` wants the name compute_score_batch.

Settings are those of RewardSettings, as `reward_kwargs` or from SCOREKIT_REWARD_<NAME>. A sample's
fields are those of `extra_info`, and `ground_truth`. A failure raises: a reward manager that turns
an exception into reward 0 (verl's `rate_limited`) must not be used with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.adapters.rewards import message_text, reward_settings, rewards_for
from scorekit.scorers import raise_for_failures


def compute_score(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """Return the reward of one completion.

    Raises SampleError, RequestError, ServiceUnreachable or UserError."""
    return compute_score_batch(
        [data_source], [solution_str], [ground_truth], [extra_info], **kwargs
    )[0]


def compute_score_batch(
    data_sources: Sequence[Any],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any] | None],
    reward_router_address: Any = None,
    reward_model_tokenizer: Any = None,
    **settings: Any,
) -> list[float]:
    """Return the rewards of a batch, in order. One failed sample fails the batch.

    reward_router_address, reward_model_tokenizer: verl passes them if it runs a reward model.

    Raises the errors of `compute_score`.
    """
    rewards = rewards_for(reward_settings(**settings))
    samples = []
    for mt, truth, extra in zip(solution_strs, ground_truths, extra_infos, strict=True):
        fields = {**(extra or {}), "ground_truth": truth}
        prompt = fields.get("prompt")
        text = None if prompt is None else message_text(prompt)
        samples.append(rewards.samples.sample(fields, text, mt))
    results = raise_for_failures(rewards.score(samples))
    return [rewards.reward(result) for result in results]
