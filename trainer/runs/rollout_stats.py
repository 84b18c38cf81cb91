"""Stats of ids, log-probabilities, advantages and updates, and how any task shows them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainer.rl.advantage import TokenAdvantages
from trainer.rl.config import RLConfig
from trainer.rl.engines.vllm_protocol import FAULT_CAUSES
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
    StatSpec(key="importance_masked_frac", column="masked", form="6.3f"),
    StatSpec(key="staleness_mean", column="stale", form="5.2f"),
    StatSpec(key="dropped_stale", column="dropped", form="7.0f"),
    StatSpec(key="rollout_s", column="roll_s", form="6.1f", narrow=True),
    StatSpec(key="logprob_s", column="logp_s", form="6.1f", narrow=True),
    StatSpec(key="reward_s", column="rew_s", form="6.1f", narrow=True),
    StatSpec(key="waited_s", column="wait_s", form="6.1f"),
    StatSpec(key="update_s", column="upd_s", form="6.1f", narrow=True),
)
LEARNING_CURVES = (
    Curve(title="KL to the reference", keys=("kl_ref", "kl_ref_k3")),
    Curve(title="KL of a step, and share of tokens clipped", keys=("approx_kl", "clip_frac")),
    Curve(
        title="log-probability gap, sampler to trainer",
        keys=("sampler_gap_mean", "sampler_gap_max"),
    ),
    Curve(title="importance weight (mean)", keys=("importance_weight_mean",)),
    Curve(
        title="share of tokens truncated and masked",
        keys=("importance_capped_frac", "importance_masked_frac"),
    ),
    Curve(
        title="share of sequences truncated and masked",
        keys=("importance_capped_sequence_frac", "importance_masked_sequence_frac"),
    ),
    Curve(
        title="staleness of tokens (updates)",
        keys=("staleness_mean", "staleness_max", "staleness_spread_max"),
    ),
    Curve(title="rollouts dropped as too stale", keys=("dropped_stale",)),
    Curve(title="vLLM servers that took part (the least number)", keys=("sampler_servers",)),
    Curve(title="turns that went to another vLLM server", keys=("sampler_moved",)),
    Curve(
        title="vLLM answers that were no completions, and were sent again (by cause)",
        keys=tuple(f"sampler_faults_{cause}" for cause in FAULT_CAUSES),
    ),
    Curve(title="entropy (estimate)", keys=("entropy_est",)),
    Curve(title="policy loss", keys=("policy_loss",)),
    Curve(title="gradient norm before clipping", keys=("grad_norm",)),
)


def rollout_stats(rollouts: Sequence[Rollout]) -> Stats:
    """Return lengths and entropy of rollouts.

    They are of sampled tokens, with EOS, without observations. `entropy_est` is the mean -log pi.
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


#: Stats of `importance_stats`.
_IMPORTANCE_NAMES = (
    "sampler_gap_mean",
    "sampler_gap_max",
    "importance_weight_mean",
    "importance_capped_frac",
    "importance_masked_frac",
    "importance_capped_sequence_frac",
    "importance_masked_sequence_frac",
)


def importance_stats(rollouts: Sequence[Rollout], cfg: RLConfig) -> Stats:
    """Return the gap |log pi - log pi_sampler| of sampled tokens, and the importance weights.

    `importance_capped_frac` is the share of tokens with a weight of at least the cap, and
    `importance_masked_frac` that of tokens with the weight 0. The `..._sequence_frac` are the
    shares of sequences of which all tokens are so. None if both log-probabilities are the same, or
    the update has computed none.
    """
    corrected = [r for r in rollouts if r.sampler_logprobs and r.old_logprobs and any(r.actions)]
    if not corrected:
        return dict.fromkeys(_IMPORTANCE_NAMES)
    old_BT, sampler_BT = (
        logprob_rows(corrected, f"{policy_name}_logprobs") for policy_name in ("old", "sampler")
    )
    mask_BT = action_masks(corrected)
    gap = (old_BT - sampler_BT).abs()[mask_BT]
    weights_BT = cfg.chosen_algorithm.importance_weights(
        old_BT, sampler_BT, mask_BT, mask_BT, cfg.correction
    )
    capped_BT, masked_BT = weights_BT >= cfg.importance_cap, weights_BT == 0

    def shares(name: str, chosen_BT: Tensor) -> Stats:
        sequences_B = (chosen_BT | ~mask_BT).all(-1)
        return {
            f"importance_{name}_frac": chosen_BT[mask_BT].float().mean().item(),
            f"importance_{name}_sequence_frac": sequences_B.float().mean().item(),
        }

    return {
        "sampler_gap_mean": gap.mean().item(),
        "sampler_gap_max": gap.max().item(),
        "importance_weight_mean": weights_BT[mask_BT].mean().item(),
        **shares("capped", capped_BT),
        **shares("masked", masked_BT),
    }


def staleness_stats(rollouts: Sequence[Rollout], update: int) -> Stats:
    """Return the staleness of the sampled tokens that update `update` (from 1) learns from.

    A token's is the number of updates between the weights that sampled it and those that learn
    from it, update - 1 - version. `staleness_spread_max` is the largest difference of versions
    within a group. Rollouts without versions are left out; None if no others remain.
    """
    versions_by_group: dict[int, list[int]] = {}
    for rollout in rollouts:
        versions = zip(rollout.weight_versions or (), rollout.actions, strict=False)
        sampled = [version for version, is_action in versions if is_action]
        if sampled:
            versions_by_group.setdefault(rollout.group, []).extend(sampled)
    groups = list(versions_by_group.values())
    ages = [update - 1 - version for versions in groups for version in versions]
    return {
        "staleness_mean": mean_of(ages),
        "staleness_max": max(ages, default=None),
        "staleness_spread_max": max((max(group) - min(group) for group in groups), default=None),
    }


def advantage_stats(advantages: TokenAdvantages | None) -> Stats:
    """Return A_raw and A_norm over the trained tokens; None without any."""
    if advantages is None:
        return mean_std("A_raw", []) | mean_std("A_norm", [])
    raw = advantages.raw[advantages.mask].tolist()
    norm = advantages.values[advantages.mask].tolist()
    return mean_std("A_raw", raw) | mean_std("A_norm", norm)
