"""Rewards in slime's own process: a reward function, and the functions that go with it.

    --custom-rm-path scorekit.adapters.slime.reward
    --custom-reward-post-process-path scorekit.adapters.slime.post_process_rewards
    --custom-rollout-log-function-path scorekit.adapters.slime.log_components
    --custom-config-path slime.yaml

slime.yaml has the settings of RewardSettings, which may also come from SCOREKIT_REWARD_<NAME>:

    scorekit: {definition: /path/reward.yaml, src_key: src}

A sample's fields are those of `metadata` and of its label (a JSON object, or a text, `label`), and
`finish_reason`. A completion that cannot be scored, or whose status is `failed` or `aborted`, has
the reward NaN and `remove_sample`: it leaves the loss, and the mean and deviation of its group. If
no sample was scored for `deadline_s`, the function raises. slime waits for it without a limit, so
`deadline_s` bounds each call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from scorekit.adapters.shared import (
    RewardSettings,
    Sent,
    TrainerReward,
    TrainerRow,
    component_columns,
    fields_of,
    is_outage,
    message_text,
    once_per_loop,
    raise_for_outage,
    reward_settings,
)
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.rewards import RewardResult
from scorekit.text.end_marks import without_end_marks

log = logging.getLogger(__name__)

#: What slime gives beside single rows.
_SENDS: tuple[Sent, ...] = ("finish_reason", "groups")
#: Key of a sample's `metadata` with the numbers of its components, and why it has no reward.
STATS_KEY, REASON_KEY = "scorekit_stats", "scorekit_no_reward"
#: Estimators for which slime subtracts the group's mean, divides by its deviation, or does neither.
_CENTERED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_SCALED = ("grpo", "gspo", "cispo")
_RAW = ("ppo", "reinforce_plus_plus")
#: Of the values of `Sample.Status`; of others it is not known.
_FINISH_REASONS = {"truncated": "length", "completed": "stop"}
#: Statuses of a completion that the policy could not finish. Its text is no translation.
_NOT_GENERATED = {"failed": "slime: failed", "aborted": "slime: aborted"}


class SlimeRewards:
    """Scores samples of slime within one event loop. Concurrent calls share requests."""

    def __init__(self, settings: RewardSettings) -> None:
        self._reward = TrainerReward(settings, "slime", sends=_SENDS)
        self._has_group_rules = (
            settings.definition is not None and settings.definition.has_group_rules
        )
        self._call_ended = asyncio.Condition()
        self._num_running = 0
        self._scored_at = -math.inf

    async def score(self, samples: Sequence[Any], *, is_group: bool) -> list[RewardResult]:
        """Return the results of slime's samples.

        is_group: rules of groups may compare them.

        Raises ServiceUnreachable if services answer neither for these samples nor for those of
        other calls, and the errors of `CompositeReward.score`.
        """
        if self._has_group_rules and not is_group:
            raise UserError("the definition has a rule of groups. Start slime with --group-rm")
        groups = [sample.group_index for sample in samples] if is_group else None
        rows = [_row(sample) for sample in samples]
        self._num_running += 1
        results: list[RewardResult] = []
        try:
            results = await self._reward.score(rows, groups)
        finally:
            self._num_running -= 1
            if any(result.reward is not None for result in results):
                self._scored_at = time.monotonic()
            async with self._call_ended:
                self._call_ended.notify_all()
        if is_outage(results):
            await self._check_outage(results)
        return results

    async def _check_outage(self, results: Sequence[RewardResult]) -> None:
        """Raise ServiceUnreachable if no call has scored a sample for `deadline_s`.

        Else the failure is that of these texts. Calls that are still running are waited for: each
        ends at its own deadline."""
        oldest = time.monotonic() - self._reward.deadline_s
        async with self._call_ended:
            await self._call_ended.wait_for(
                lambda: self._scored_at > oldest or not self._num_running
            )
        if self._scored_at <= oldest:
            raise_for_outage(results)


def _row(sample: Any) -> TrainerRow:
    fields = {
        **sample.metadata,
        **fields_of(sample.label),
        "finish_reason": _FINISH_REASONS.get(sample.status.value),
    }
    return TrainerRow(fields, message_text(sample.prompt), without_end_marks(sample.response))


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    """Return the reward of a sample, or a list for a list of samples, as slime wants them.

    sample: a `Sample` of slime; a list with --group-rm, or where a generate function returns
    several. With --reward-key a reward is a dict: the number under that key, and those of the
    components. A sample without a reward is marked, and its number is NaN.
    Raises UserError for a wrong setting, and the errors of `SlimeRewards.score`.
    """
    _check_args(args)
    samples = sample if isinstance(sample, list) else [sample]
    results = await _rewards_of(args).score(samples, is_group=bool(args.group_rm))
    for index, status in enumerate(sample.status.value for sample in samples):
        if status in _NOT_GENERATED:
            results[index] = replace(results[index], reward=None, reason=_NOT_GENERATED[status])
    columns = component_columns(results)
    values = []
    for index, result in enumerate(results):
        stats = {name: column[index] for name, column in columns.items()}
        _mark(samples[index], result, stats)
        values.append(_value(args, result, stats))
    return values if isinstance(sample, list) else values[0]


def _rewards_of(args: Any) -> SlimeRewards:
    values = getattr(args, "scorekit", None) or {}
    if not isinstance(values, Mapping):
        raise UserError(
            f"--custom-config-path: scorekit: {values!r} are no settings. Set a mapping"
        )
    return once_per_loop("slime", values, lambda: SlimeRewards(reward_settings(**values)))


def _check_args(args: Any) -> None:
    """Raise UserError if slime would use a reward that is missing."""
    _normalization(args)
    if args.custom_reward_post_process_path is None:
        raise UserError(
            "--custom-reward-post-process-path: not set, so a failed sample would spoil its group. "
            f"Set {__name__}.post_process_rewards"
        )
    if args.eval_reward_key and not args.reward_key:
        raise UserError("--eval-reward-key: needs --reward-key, too. Set both, or neither")


def _normalization(args: Any) -> tuple[bool, bool]:
    """Return whether slime subtracts a group's mean, and divides by its deviation.

    Raises UserError for an estimator of which this is not known.
    """
    estimator = args.advantage_estimator
    if estimator not in (*_CENTERED, *_RAW):
        valid_names = ", ".join((*_CENTERED, *_RAW))
        raise UserError(f"--advantage-estimator: {estimator}. Choose one of {valid_names}")
    is_centered = bool(args.rewards_normalization) and estimator in _CENTERED
    is_scaled = is_centered and estimator in _SCALED and bool(args.grpo_std_normalization)
    return is_centered, is_scaled


def _mark(sample: Any, result: RewardResult, stats: Mapping[str, float | None]) -> None:
    """Keep a sample's components, and mark it if it has no reward."""
    sample.metadata[STATS_KEY] = dict(stats)
    if result.reward is None:
        cause = result.cause if result.reason not in _NOT_GENERATED.values() else result.reason
        log.warning("sample %s leaves the loss: %s", sample.index, cause)
        sample.metadata[REASON_KEY] = result.reason
        sample.remove_sample = True
    elif sample.metadata.pop(REASON_KEY, None) is not None:  # it failed before, and was asked again
        sample.remove_sample = False


def _value(args: Any, result: RewardResult, stats: Mapping[str, float | None]) -> Any:
    number = math.nan if result.reward is None else result.reward
    if not args.reward_key:
        return number
    return {**stats, args.reward_key: number, args.eval_reward_key or args.reward_key: number}


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the raw rewards for slime's log, and the rewards that it trains on.

    As slime's own normalization, but a sample whose reward is NaN counts in no mean and no
    deviation; trained reward: 0 where the mean is subtracted, which is that mean, and else the mean
    of all samples. It is out of the loss by `remove_sample`. Its raw reward is the mean of all
    samples, so that the mean that slime logs is that of the scored ones.
    Groups are those of `group_index`; slime's own function takes all samples for one group where a
    group is not complete (its issue 1414).

    Raises ServiceUnreachable if no sample has a reward, UserError for an unknown estimator.
    """
    is_centered, is_scaled = _normalization(args)
    values = [float(sample.get_reward_value(args)) for sample in samples]
    scored = [value for value in values if not math.isnan(value)]
    if not scored:
        raise ServiceUnreachable("reward", f"none of {len(samples)} samples of a rollout has one")
    mean = fmean(scored)
    raw = [mean if math.isnan(value) else value for value in values]
    if not is_centered:
        return raw, list(raw)
    groups: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        group = sample.group_index
        position = index // args.n_samples_per_prompt
        groups.setdefault(("position", position) if group is None else group, []).append(index)
    rewards = [0.0] * len(samples)
    for indices in groups.values():
        rows = [index for index in indices if not math.isnan(values[index])]
        for row, value in zip(rows, _normalize([values[i] for i in rows], is_scaled), strict=True):
            rewards[row] = value
    return raw, rewards


def _normalize(values: Sequence[float], is_scaled: bool) -> list[float]:
    """Return the rewards of a group less their mean, divided by their deviation if is_scaled."""
    if not values:
        return []
    mean = fmean(values)
    scale = stdev(values) + 1e-6 if is_scaled and len(values) > 1 else 1.0
    return [(value - mean) / scale for value in values]


def log_components(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Add to slime's metrics the mean of each component, and the share of samples with a value.

    Returns False: slime then logs them with its own.
    """
    if rollout_extra_metrics is None:
        return False
    is_scored = [not math.isnan(sample.get_reward_value(args)) for sample in samples]
    rollout_extra_metrics["reward/coverage"] = fmean(is_scored)
    names = {name: None for sample in samples for name in sample.metadata.get(STATS_KEY, {})}
    for name in names:
        column = [sample.metadata.get(STATS_KEY, {}).get(name) for sample in samples]
        present = [value for value in column if value is not None]
        rollout_extra_metrics[f"reward/coverage/{name}"] = len(present) / len(column)
        if present:
            rollout_extra_metrics[f"reward/{name}"] = fmean(present)
    return False
