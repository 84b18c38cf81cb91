"""Stats of ids, log-probabilities, advantages and updates, for every task, and how they are
shown."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rl.advantage import TokenAdvantages
from trainer.rl.config import RLConfig
from trainer.rl.rollout import Rollout, action_masks, logprob_rows
from trainer.runs.stats import COMPLETION_LENGTH, Curve, Stats, StatSpec, mean_of, mean_std

#: Stats of completions, in the table of any task.
OF_COMPLETIONS = (
    COMPLETION_LENGTH,
    StatSpec(
        key="truncated_frac",
        title="cut by max_new_tokens",
        better="lower",
        value_of_row=lambda line: line["finish_reason"] == "length",
    ),
)
#: Stats of advantages and the update, and times.
OF_LEARNING = (
    StatSpec(key="A_raw_mean", column="A_raw"),
    StatSpec(key="A_raw_std", column="± raw", form="6.3f"),
    StatSpec(key="A_norm_mean", column="A_norm"),
    StatSpec(key="A_norm_std", column="± norm", form="6.3f"),
    StatSpec(key="policy_loss", column="loss", form="8.4f", narrow=True),
    StatSpec(key="approx_kl", column="approx_kl", form="9.2e"),
    StatSpec(key="kl_ref", column="kl_ref", form="7.4f", narrow=True),
    StatSpec(key="clip_frac", column="clip", form="6.3f", narrow=True),
    StatSpec(key="rollout_s", column="roll_s", form="6.1f", narrow=True),
    StatSpec(key="logprob_s", column="logp_s", form="6.1f", narrow=True),
    StatSpec(key="reward_s", column="rew_s", form="6.1f", narrow=True),
    StatSpec(key="update_s", column="upd_s", form="6.1f", narrow=True),
)
LEARNING_CURVES = (
    Curve(title="KL to the reference", keys=("kl_ref", "kl_ref_k3")),
    Curve(title="KL of a step, and share of tokens clipped", keys=("approx_kl", "clip_frac")),
    Curve(
        title="log-probability gap, sampler to trainer",
        keys=("sampler_gap_mean", "sampler_gap_max"),
    ),
    Curve(title="vLLM servers that took part (the least number)", keys=("sampler_servers",)),
    Curve(title="turns that went to another vLLM server", keys=("sampler_moved",)),
    Curve(title="entropy (estimate)", keys=("entropy_est",)),
    Curve(title="policy loss", keys=("policy_loss",)),
    Curve(title="gradient norm before clipping", keys=("grad_norm",)),
)


def rollout_stats(rollouts: Sequence[Rollout]) -> Stats:
    """Return lengths and entropy of rollouts.

    Lengths count sampled tokens, with EOS, without observations. `entropy_est` is the mean of -log
    pi of sampled tokens.
    """
    logprobs = [
        value
        for rollout in rollouts
        for value, is_action in zip(rollout.old_logprobs or (), rollout.actions, strict=False)
        if is_action
    ]
    entropy = mean_of(logprobs)
    sampled = [sum(rollout.actions) for rollout in rollouts]
    return {
        "samples": len(rollouts),
        "tokens": sum(sampled),
        "completion_length_mean": mean_of(sampled),
        "truncated_frac": mean_of([r.finish_reason == "length" for r in rollouts]),
        "entropy_est": None if entropy is None else -entropy,
    }


def importance_stats(rollouts: Sequence[Rollout], cfg: RLConfig) -> Stats:
    """Return the gap |log pi - log pi_sampler| of sampled tokens, and the importance weights.

    None if both log-probabilities are the same, or the update has computed none.
    """
    corrected = [r for r in rollouts if r.sampler_logprobs and r.old_logprobs]
    if not corrected:
        names = ("sampler_gap_mean", "sampler_gap_max")
        return dict.fromkeys((*names, "importance_weight_mean", "importance_capped_frac"))
    old_BT, sampler_BT = (
        logprob_rows(corrected, f"{policy_name}_logprobs") for policy_name in ("old", "sampler")
    )
    mask_BT = action_masks(corrected)
    gap = (old_BT - sampler_BT).abs()[mask_BT]
    weights = cfg.chosen_algorithm.importance_weights(
        old_BT, sampler_BT, mask_BT, cfg.importance_cap, cfg.max_log_ratio
    )[mask_BT]
    return {
        "sampler_gap_mean": gap.mean().item(),
        "sampler_gap_max": gap.max().item(),
        "importance_weight_mean": weights.mean().item(),
        "importance_capped_frac": (weights >= cfg.importance_cap).float().mean().item(),
    }


def advantage_stats(advantages: TokenAdvantages | None) -> Stats:
    """Return A_raw and A_norm over the trained tokens; None without any."""
    if advantages is None:
        return mean_std("A_raw", []) | mean_std("A_norm", [])
    raw = advantages.raw[advantages.mask].tolist()
    norm = advantages.values[advantages.mask].tolist()
    return mean_std("A_raw", raw) | mean_std("A_norm", norm)
