"""The stats of a role-play run, and the table that describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from trainer.roleplay.evaluation.diagnostics import distinct
from trainer.roleplay.rewards import REWARDS, Reward
from trainer.runs.stats import COMPLETION_LENGTH, Curve, Stats, StatSpec, mean_of

_FRONT = (
    StatSpec(key="update", column="update", form="6d", narrow=True),
    StatSpec(
        key="reward_mean",
        title="reward (weighted sum)",
        better="higher",
        column="reward",
        narrow=True,
        in_console=True,
        value_of_row=lambda line: line["reward"],
        ranks="the reward",
    ),
    StatSpec(key="reward_group_std", column="± group", form="7.3f", narrow=True),
)
_NO_REWARD = " (never a reward)"


def _unrewarded(key: str, title: str, **options: Any) -> StatSpec:
    """Return a stat of a reply that is no reward, read from a line of the dump."""
    options = {"value_of_row": itemgetter(key)} | options
    return StatSpec(key=key, title=f"{title}{_NO_REWARD}", **options)


_UNREWARDED = (
    _unrewarded(
        "chrf",
        "chrF to the reference",
        digits=2,
        better="higher",
        in_console=True,
        hidden_at=(None,),
    ),
    _unrewarded("copied_user", "copied from the user's turn", better="lower"),
    _unrewarded("copied_reference", "copied from the reference", hidden_at=(None,)),
    _unrewarded("repeated", "repeated within a reply", better="lower"),
    _unrewarded("distinct", "distinct replies", better="higher", value_of_row=None),
    _unrewarded("characters", "characters of a reply", digits=1),
    replace(COMPLETION_LENGTH, title=f"tokens of a reply{_NO_REWARD}"),
    _unrewarded(
        "clipped_ratio",
        "truncated by max_completion_length",
        better="lower",
        column="cut",
        form="5.2f",
        narrow=True,
        in_console=True,
        value_of_row=lambda line: line["finish_reason"] == "length",
    ),
    _unrewarded("kl_start", "KL to the start, a token", digits=4, hidden_at=(None,)),
)
_LEARNING = (
    StatSpec(key="frac_reward_zero_std", column="no dev", form="6.2f"),
    StatSpec(key="loss", column="loss", form="8.4f", narrow=True),
    StatSpec(key="kl", column="kl", form="8.5f"),
    StatSpec(key="entropy", column="entropy", form="7.3f"),
    StatSpec(key="grad_norm", column="grad", form="7.3f", narrow=True),
    StatSpec(key="rollout_s", column="roll_s", form="6.1f", narrow=True),
    StatSpec(key="reward_s", column="rew_s", form="6.1f", narrow=True),
    StatSpec(key="update_s", column="upd_s", form="6.1f", narrow=True),
)
#: Stats of a line of an evaluation's dump that are not of a reward.
_LINE_STATS = ("chrf", "copied_user", "copied_reference", "repeated", "characters", "kl_start")


def _reward_stat(reward: Reward) -> StatSpec:
    return StatSpec(
        key=f"{reward.name}_mean",
        title=reward.name,
        better="higher",
        column=reward.short,
        form="10.3f",
        in_console=True,
        value_of_row=lambda line: line["rewards"][reward.name],
    )


def _component(stat: StatSpec) -> StatSpec:
    """Return a stat with an indented title, read from a line of the dump."""
    return replace(
        stat,
        title=f"  {stat.title}",
        hidden_at=(None,),
        value_of_row=lambda line: line["components"].get(stat.key),
    )


def table() -> tuple[StatSpec, ...]:
    """Return every stat in the order of display: rewards with their components, then other
    stats."""
    rewards = (
        stat
        for reward in REWARDS
        for stat in (_reward_stat(reward), *map(_component, reward.components))
    )
    return (*_FRONT, *rewards, *_UNREWARDED, *_LEARNING)


def curves() -> tuple[Curve, ...]:
    """Return the charts of a run's page."""
    reward_curves = (
        Curve(
            title=reward.name,
            keys=(f"{reward.name}_mean", *(stat.key for stat in reward.components)),
            held_out=f"{reward.name}_mean",
        )
        for reward in REWARDS
    )
    return (
        Curve.with_held_out("reward", "reward_mean"),
        *reward_curves,
        Curve(
            title="deviation of the reward within a group",
            keys=("reward_group_std", "frac_reward_zero_std"),
        ),
        Curve.with_held_out("replies truncated by max_completion_length", "clipped_ratio"),
        Curve.with_held_out("reply length (tokens)", "completion_length_mean"),
        Curve(title="held-out chrF (never a reward)", held_out="chrf"),
        Curve(title="held-out copying of the user's turn", held_out="copied_user"),
        Curve(title="held-out repetition", held_out="repeated"),
        Curve(title="held-out KL to the start", keys=("kl",), held_out="kl_start"),
        Curve(title="entropy", keys=("entropy",)),
        Curve(title="loss", keys=("loss",)),
        Curve(title="gradient norm before clipping", keys=("grad_norm",)),
        Curve(title="seconds of an update", keys=("rollout_s", "reward_s", "update_s")),
    )


def compute_stats(lines: Sequence[Mapping[str, Any]]) -> Stats:
    """Return the means over the lines of an evaluation's dump that have a value."""
    stats: Stats = {
        "samples": len(lines),
        "reward_mean": mean_of([line["reward"] for line in lines]),
        "completion_length_mean": mean_of([line["tokens"] for line in lines]),
        "clipped_ratio": mean_of([line["finish_reason"] == "length" for line in lines]),
        "distinct": distinct([line["completion"] for line in lines]),
    }
    for reward in REWARDS:
        values = [line["rewards"][reward.name] for line in lines]
        stats[f"{reward.name}_mean"] = mean_of(values)
    for key in _LINE_STATS:
        stats[key] = mean_of([line[key] for line in lines if line[key] is not None])
    components = dict.fromkeys(key for line in lines for key in line["components"])
    for key in components:
        stats[key] = mean_of(
            [line["components"][key] for line in lines if key in line["components"]]
        )
    return stats
