"""Token rewards for verl 0.9.1: an agent loop, and an advantage estimator that keeps positions.

The file of `actor_rollout_ref.rollout.agent.agent_loop_config_path`:

    - name: scorekit_tokens
      _target_: scorekit.adapters.verl_tokens.TokenRewardLoop
      settings: {url: "http://127.0.0.1:8002", src_key: src}
      severity_weights: {MINOR: -1.0, MAJOR: -5.0, CRITICAL: -10.0}

With `settings: {definition: reward.yaml}` the rewards of texts and tokens are those of the
definition. Where it has no `token_rewards`, `span_component` names the component whose error spans
become rewards of tokens. This module imports torch and verl: import it only where both are
installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.core_algos import register_adv_est

from scorekit.adapters.shared import TrainerRow, message_text, reward_settings
from scorekit.adapters.verl import mistakes_end_the_run, plain_settings, reward_of_loop
from scorekit.adapters.verl_run import span_weights
from scorekit.credit import DecodeConfig, decode_completion
from scorekit.credit.assign import align_scored
from scorekit.credit.checks import MAX_FLOAT32
from scorekit.errors import SampleError, UserError
from scorekit.prompts import load_postprocess


class TokenRewardOutput(AgentLoopOutput):  # type: ignore[misc]
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


class TokenRewardLoop(SingleTurnAgentLoop):  # type: ignore[misc]
    """Samples one completion and gives each of its tokens a reward.

    The rewards of error spans are on their tokens, the sequence reward is on the last token that
    is trained on. Tokens that the service has not read leave the loss: their mask is 0. A
    completion without a score, or whose spans do not fit its text, raises, so verl drops it from
    its group.
    """

    @mistakes_end_the_run()
    def __init__(
        self,
        *args: Any,
        settings: Mapping[str, Any],
        severity_weights: Mapping[str, float | None] | None = None,
        span_component: str | None = None,
        stop_ids: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the settings; nothing is requested yet.

        settings: those of RewardSettings.
        span_component: of a definition without `token_rewards`, the component of a service that
        marks error spans.
        severity_weights: None: those of `scorekit.credit`.
        stop_ids: ids that end a completion and are no part of its text; None: the tokenizer's EOS.
        Raises RunEnds if a setting is wrong.
        """
        super().__init__(*args, **kwargs)
        if not isinstance(settings, Mapping):
            raise UserError(f"settings: {settings!r} are no settings. Set a mapping")
        self.settings = plain_settings(settings)
        checked = reward_settings(**self.settings)
        self.spans = span_weights(checked, span_component, severity_weights, stop_ids)
        self.decode_cfg = DecodeConfig(load_postprocess(checked.postprocess))
        eos = self.tokenizer.eos_token_id
        default_stops = [] if eos is None else [eos]
        self.stop_ids = default_stops if stop_ids is None else list(stop_ids)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> TokenRewardOutput:
        """Return a completion with token rewards.

        kwargs: the dataset's row. Raises the errors of the adapter's clients, SampleError for spans
        outside the text, and RunEnds for a mistake, such as a severity without a weight."""
        output = await super().run(sampling_params, **kwargs)
        ids = list(output.response_ids)
        if not ids:
            raise SampleError("invalid_input", "the completion has no token to reward")
        text = decode_completion(self.tokenizer, ids[:-1] if ids[-1] in self.stop_ids else ids)
        truth = (kwargs.get("reward_model") or {}).get("ground_truth")
        fields = {**(kwargs.get("extra_info") or {}), "ground_truth": truth}
        with mistakes_end_the_run():
            prompt = message_text(list(kwargs["raw_prompt"]))
            reward = reward_of_loop(self.settings, self.spans)
            result = await reward.score_one(TrainerRow(fields, prompt, text))
            try:
                alignment = align_scored(
                    self.tokenizer, ids, decode_cfg=self.decode_cfg, stop_ids=self.stop_ids
                )
                tokens = reward.token_rewards(result, alignment)
            except ValueError as error:
                raise SampleError("model_failure", str(error)) from None
        assert result.reward is not None
        pairs = zip(output.response_mask, tokens.valid, strict=True)
        mask = [int(bool(sampled) and is_valid) for sampled, is_valid in pairs]
        rewards = place_rewards(result.reward, tokens.rewards, mask)
        values = {name: getattr(output, name) for name in output.model_fields_set}
        values["response_mask"] = mask
        values["reward_score"] = sum(rewards)
        values["extra_fields"] = {
            **output.extra_fields,
            "reward_extra_info": {"score": result.reward, **reward.numbers(result)},
        }
        return TokenRewardOutput(**values, token_rewards=rewards)


def place_rewards(
    sequence_reward: float, token_rewards: Sequence[float], mask: Sequence[int]
) -> list[float]:
    """Return the token rewards with the sequence reward on the last token that is trained on.

    mask: [T] 1 on tokens that are trained on; others have reward 0.
    That token holds nothing else, so that the estimator can tell the two apart: a reward of its
    own moves to the trained token before it. That happens only if a completion was cut at its
    length limit, or if the service has not read all of it.
    Raises SampleError if no token is trained on, and ValueError if a number is not finite in
    float32.
    """
    trained = [token for token, is_trained in enumerate(mask) if is_trained]
    if not trained:
        raise SampleError("invalid_input", "the service has read no token of the completion")
    rewards = [
        reward if is_trained else 0.0
        for reward, is_trained in zip(token_rewards, mask, strict=True)
    ]
    *before, last = trained
    if before:
        rewards[before[-1]] += rewards[last]
        rewards[last] = 0.0
    rewards[last] += sequence_reward
    if not all(abs(reward) <= MAX_FLOAT32 for reward in rewards):
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

    token_level_rewards: [B, T], the sequence reward on the last valid token.
    response_mask: [B, T], 1 on tokens that are trained on. If rejection sampling masks the last
    one, the rewards from the last valid one on are the sequence reward. A row without a valid token
    counts in no mean.
    index: [B], groups.
    Raises ValueError if a reward that counts is NaN or infinite: one would spoil the whole batch.
    """
    rewards_BT = token_level_rewards.double()
    mask_BT = response_mask.bool()
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = torch.where(mask_BT, positions_T, -1).max(dim=1).values
    is_sequence_BT = positions_T >= last_B[:, None]
    counts_BT = (mask_BT | is_sequence_BT) & (last_B >= 0)[:, None]
    if not rewards_BT[counts_BT].isfinite().all():
        raise ValueError("token_level_rewards: a reward is NaN or infinite")
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
