"""Token rewards for verl 0.9.1: an agent loop, and an advantage estimator that keeps positions.

The file of `actor_rollout_ref.rollout.agent.agent_loop_config_path`:

    - name: scorekit_tokens
      _target_: scorekit.adapters.verl_tokens.TokenRewardLoop
      settings: {url: "http://127.0.0.1:8002", src_key: src}
      credit: package.module:function
      severity_weights: {MINOR: -1.0, MAJOR: -5.0, CRITICAL: -10.0}

`credit` has the arguments (tokenizer, ids). It returns the text to score, and a function that maps
(error spans, severity weights) to one reward for each id. This module imports torch and verl:
import it only where both are installed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.core_algos import register_adv_est

from scorekit.adapters.rewards import message_text, reward_settings
from scorekit.adapters.verl import async_rewards, plain_settings
from scorekit.errors import SampleError, UserError

Assign = Callable[[Sequence[Any], Mapping[str, float | None]], list[float]]
Credit = Callable[[Any, Sequence[int]], tuple[str, Assign]]


class TokenRewardOutput(AgentLoopOutput):
    """Holds an agent loop's output with one reward for each response token."""

    token_rewards: list[float]

    def as_dict(self) -> dict[str, Any]:
        """Return verl's dictionary with `rm_scores` set to the token rewards, float32 [T]."""
        output = super().as_dict()
        rewards_T = torch.tensor(output.pop("token_rewards"), dtype=torch.float32)
        if rewards_T.shape != output["responses"].shape:
            raise ValueError(f"{len(rewards_T)} rewards for {len(output['responses'])} tokens")
        output["rm_scores"] = rewards_T
        return output


class TokenRewardLoop(SingleTurnAgentLoop):
    """Samples one completion and gives each of its tokens a reward.

    The sequence reward is on the last token, the rewards of error spans are on their tokens. A
    completion without a score raises, so verl drops it from its group.
    """

    def __init__(
        self,
        *args: Any,
        credit: str,
        severity_weights: Mapping[str, float | None],
        settings: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.credit = load_credit(credit)
        self.severity_weights = dict(severity_weights)
        self.settings = reward_settings(**plain_settings(settings))

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> TokenRewardOutput:
        """Return a completion with token rewards.

        kwargs: the dataset's row. Raises the errors of `AsyncRewards.score`."""
        output = await super().run(sampling_params, **kwargs)
        if not output.response_ids:
            raise SampleError("invalid_input", "the completion has no token to reward")
        text, assign = self.credit(self.tokenizer, output.response_ids)
        truth = (kwargs.get("reward_model") or {}).get("ground_truth")
        fields = {**(kwargs.get("extra_info") or {}), "ground_truth": truth}
        prompt = message_text(list(kwargs["raw_prompt"]))
        scored = await async_rewards(self.settings).score(fields, prompt, text)
        spans = getattr(scored.result, "error_spans", None)
        if spans is None:
            raise UserError("url: the service gives no error spans. Name one that does (xcomet)")
        rewards = place_rewards(scored.reward, assign(spans, self.severity_weights))
        values = {name: getattr(output, name) for name in output.model_fields_set}
        values["reward_score"] = sum(rewards)
        values["extra_fields"] = {
            **output.extra_fields,
            "reward_extra_info": {"score": scored.reward, **scored.components},
        }
        return TokenRewardOutput(**values, token_rewards=rewards)


def load_credit(path: str) -> Credit:
    """Return the function at `module:function`. Raises UserError if there is none."""
    module, _, name = path.partition(":")
    try:
        credit: Credit = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"credit: {path!r} cannot be loaded: {error}") from None
    return credit


def place_rewards(sequence_reward: float, token_rewards: Sequence[float]) -> list[float]:
    """Return the token rewards with the sequence reward on the last token.

    The last token holds nothing else, so that the estimator can tell the two apart: a reward of its
    own moves to the token before it. That happens only if a completion was cut at its length limit.
    Raises ValueError if a number is not finite.
    """
    rewards = list(token_rewards)
    if len(rewards) > 1:
        rewards[-2] += rewards[-1]
        rewards[-1] = 0.0
    rewards[-1] += sequence_reward
    if not all(map(math.isfinite, rewards)):
        raise ValueError("a token reward is not finite")
    return rewards


@register_adv_est("scorekit_tokens")
def token_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return advantages [B, T] and returns [B, T] that keep the position of each token's reward.

    A[b, t] = sequence reward[b] - mean of its group + token reward[b, t], normalized over all valid
    tokens of the batch (population deviation, float64). This is the sum of sequence and token
    advantages of arXiv 2601.09012, with the mean of each prompt's completions subtracted. A
    completion that is alone in its group has no sequence part, only its token rewards.

    token_level_rewards: [B, T], the sequence reward on the last token. response_mask: [B, T], 1 on
    sampled tokens. If rejection sampling masks the last token, the rewards from the last valid one
    on are the sequence reward. A row without a valid token counts in no mean. index: [B], groups.
    """
    rewards_BT = token_level_rewards.double()
    mask_BT = response_mask.bool()
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = torch.where(mask_BT, positions_T, -1).max(dim=1).values
    is_sequence_BT = positions_T >= last_B[:, None]
    sequence_B = torch.where(is_sequence_BT, rewards_BT, 0.0).sum(dim=1)
    groups: dict[Any, list[int]] = {}
    for row, group in enumerate(index):
        if last_B[row] >= 0:
            groups.setdefault(group, []).append(row)
    centered_B = torch.zeros_like(sequence_B)
    for rows in groups.values():
        centered_B[rows] = sequence_B[rows] - sequence_B[rows].mean()
    raw_BT = centered_B[:, None] + torch.where(is_sequence_BT, 0.0, rewards_BT)
    advantages_BT = torch.zeros_like(raw_BT)
    values = raw_BT[mask_BT]
    if values.numel() and values.min() != values.max():
        advantages_BT[mask_BT] = (values - values.mean()) / (values.std(correction=0) + 1e-8)
    advantages = advantages_BT.to(token_level_rewards.dtype)
    return advantages, advantages
