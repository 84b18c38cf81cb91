"""The stats of a search run, and the table of their titles, formats and directions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from trainer.runs.rollout_stats import LEARNING_CURVES, OF_LEARNING
from trainer.runs.stats import Curve, Stats, StatSpec, mean_of
from trainer.search.actions import DETAILS
from trainer.search.evaluation.episode_values import VALUES, own_turns
from trainer.search.images.views import CropErrorReason
from trainer.search.records import SUCCESS, Question, Trajectory
from trainer.search.reward.compute import NO_GOLD
from trainer.search.reward.stats import reward_stats

__all__ = ["SUCCESS", "by_document", "by_type", "compute_stats", "curves", "table"]

#: The reasons of invalid turns: of their form, their box, or a refused query.
REASONS = (*DETAILS, *get_args(CropErrorReason), "query_refused")
#: Stats of the loop that a narrow console has.
_NARROW = ("policy_loss", "rollout_s", "reward_s", "update_s")
_SECONDS = ("rollout_s", "logprob_s", "reward_s", "update_s")


def _key_reader(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Return a function that reads a key of `values_of`."""
    return lambda line: line[key]


_FRONT = (
    StatSpec(key="update", column="update", form="6d", narrow=True),
    StatSpec(
        key="reward_mean",
        title="reward",
        better="higher",
        column="reward",
        narrow=True,
        in_console=True,
        coverage="reward_coverage",
        by_group=True,
        value_of_row=_key_reader("reward_mean"),
    ),
    StatSpec(
        key="reward_coverage",
        title="reward coverage",
        better="higher",
        column="cover",
        form="5.2f",
        narrow=True,
    ),
    StatSpec(
        key="ndcg_mean",
        title="NDCG",
        better="higher",
        hidden_at=(None,),
        column="NDCG",
        narrow=True,
        in_console=True,
        coverage="ndcg_coverage",
        by_group=True,
        value_of_row=_key_reader("ndcg_mean"),
    ),
    StatSpec(
        key="judge_mean",
        title="judge's score",
        better="higher",
        hidden_at=(None,),
        column="judge",
        narrow=True,
        in_console=True,
        coverage="judge_coverage",
        by_group=True,
        value_of_row=_key_reader("judge_mean"),
    ),
    StatSpec(key="judge_coverage", title="judge coverage", better="higher", hidden_at=(None, 0)),
    StatSpec(
        key="success_share",
        title="success",
        better="higher",
        hidden_at=(None,),
        by_group=True,
        value_of_row=_key_reader("success_share"),
    ),
    StatSpec(
        key="success_without_evidence_share",
        title="success without evidence",
        better="lower",
        hidden_at=(None,),
        by_group=True,
        value_of_row=_key_reader("success_without_evidence_share"),
    ),
    StatSpec(
        key="grounded_mean",
        title="grounded in the pages shown",
        better="higher",
        hidden_at=(None,),
        value_of_row=_key_reader("grounded_mean"),
    ),
    StatSpec(
        key="gold_seen_share",
        title="a gold page was shown",
        better="higher",
        hidden_at=(None,),
        value_of_row=_key_reader("gold_seen_share"),
    ),
    StatSpec(key="format_mean", title="well-formed episodes", better="higher"),
)
_BEHAVIOR = (
    StatSpec(
        key="turns_mean",
        title="turns",
        digits=2,
        column="turns",
        form="5.2f",
        narrow=True,
        in_console=True,
        by_group=True,
        value_of_row=_key_reader("turns_mean"),
    ),
    StatSpec(
        key="searches_mean", title="searches", digits=2, value_of_row=_key_reader("searches_mean")
    ),
    StatSpec(key="crops_mean", title="crops", digits=2, value_of_row=_key_reader("crops_mean")),
    StatSpec(
        key="tokens_mean",
        title="tokens written",
        digits=1,
        hidden_at=(None,),
        value_of_row=_key_reader("tokens_mean"),
    ),
    StatSpec(
        key="invalid_mean",
        title="invalid turns of an episode",
        better="lower",
        value_of_row=_key_reader("invalid_mean"),
    ),
    StatSpec(
        key="invalid_share",
        title="invalid turns (share)",
        better="lower",
        hidden_at=(None,),
        column="invalid",
        in_console=True,
    ),
    *(
        StatSpec(
            key=f"invalid_{reason}",
            title=f"  {reason}",
            digits=0,
            better="lower",
            hidden_at=(None, 0),
        )
        for reason in REASONS
    ),
    StatSpec(
        key="forced_share",
        title="ended by force",
        better="lower",
        column="forced",
        form="6.3f",
        value_of_row=_key_reader("forced_share"),
    ),
    StatSpec(
        key="context_share", title="ended by the context", better="lower", hidden_at=(None, 0)
    ),
    StatSpec(key="declined_share", title="given up", hidden_at=(None, 0)),
    StatSpec(key="no_evidence", title="ended without a picture", digits=0, better="lower"),
)
_SERVICES = (
    StatSpec(key="answers_failed", title="answers failed (generator)", digits=0, better="lower"),
    StatSpec(key="judgements_failed", title="judgements failed", digits=0, better="lower"),
    StatSpec(key="search_failed", title="searches failed (retriever)", digits=0, better="lower"),
    StatSpec(
        key="policy_failed", title="turns failed (policy server)", digits=0, hidden_at=(None, 0)
    ),
    StatSpec(key="reward_late", title="rewards late", digits=0, hidden_at=(None, 0)),
    StatSpec(key="generator_calls", title="generator's calls", digits=0),
    StatSpec(key="judge_calls", title="judge's calls", digits=0),
    StatSpec(key="answers_known", title="answers known before", digits=0, hidden_at=(None, 0)),
    StatSpec(key="money", title="money", digits=4, hidden_at=(None,)),
)


def table() -> tuple[StatSpec, ...]:
    """Return all stats in the order of console, tables, pages and comparisons."""
    learning = (replace(stat, narrow=stat.key in _NARROW) for stat in OF_LEARNING)
    return (*_FRONT, *_BEHAVIOR, *_SERVICES, *learning)


def curves() -> tuple[Curve, ...]:
    """Return the charts of a run's page."""
    parts = ("reward", "ndcg", "judge", "format")
    return (
        Curve(title="reward", keys=("reward_mean",), held_out="reward_mean"),
        Curve(title="NDCG", keys=("ndcg_mean",), held_out="ndcg_mean"),
        Curve(title="judge's score", keys=("judge_mean",), held_out="judge_mean"),
        Curve(title="success", keys=("success_share",), held_out="success_share"),
        Curve(
            title="success without evidence",
            keys=("success_without_evidence_share",),
            held_out="success_without_evidence_share",
        ),
        Curve(title="a gold page was shown", keys=("gold_seen_share",), held_out="gold_seen_share"),
        Curve(title="coverage", keys=tuple(f"{part}_coverage" for part in parts)),
        Curve(title="groups, and those without spread", keys=("groups", "groups_without_spread")),
        Curve(title="turns", keys=("turns_mean",), held_out="turns_mean"),
        Curve(title="searches and crops", keys=("searches_mean", "crops_mean")),
        Curve(title="invalid turns (share)", keys=("invalid_share",), held_out="invalid_share"),
        Curve(title="ended by force (share)", keys=("forced_share",), held_out="forced_share"),
        *LEARNING_CURVES,
        Curve(title="seconds of an update", keys=_SECONDS),
        Curve(title="money since the run began", keys=_MONEY, sums=True),
        Curve(title="paid calls since the run began", keys=_CALLS, sums=True),
    )


_MONEY = ("cost/generator_money", "cost/judge_money")
_CALLS = ("cost/generator_calls", "cost/judge_calls")


def compute_stats(episodes: Sequence[Trajectory]) -> Stats:
    """Return the stats of rewarded episodes: means (None without a value), counts, and shares."""
    stats: Stats = {"samples": len(episodes), **reward_stats(episodes)}
    for key, value_of in VALUES.items():
        stats[key] = mean_of(
            [value for episode in episodes if (value := value_of(episode)) is not None]
        )
    turns = [turn for episode in episodes for turn in own_turns(episode)]
    reasons = Counter(turn.reason for turn in turns if turn.action == "invalid")
    stats["invalid_share"] = mean_of([turn.action == "invalid" for turn in turns])
    stats |= {f"invalid_{reason}": reasons[reason] for reason in REASONS}
    failed = [episode for episode in episodes if episode.end == "failed"]
    of_policy = sum(episode.end_detail.startswith("policy:") for episode in failed)
    stats |= {"policy_failed": of_policy, "search_failed": len(failed) - of_policy}
    stats["goldless"] = sum(
        episode.reward is not None and episode.reward.error == NO_GOLD for episode in episodes
    )
    return stats | _cost(episodes)


def _cost(episodes: Sequence[Trajectory]) -> Stats:
    """Return the paid usage of episodes; a cached answer costs nothing."""
    answers = [episode.answer.charge for episode in episodes if episode.answer]
    verdicts = [
        verdict.charge
        for episode in episodes
        for verdict in (episode.judged, episode.grounded)
        if verdict
    ]
    paid = [charge.money for charge in (*answers, *verdicts) if charge.money is not None]
    return {
        "generator_calls": sum(charge.calls for charge in answers),
        "judge_calls": sum(charge.calls for charge in verdicts),
        "answers_known": sum(charge.cached for charge in answers),
        "money": sum(paid) if paid else None,
    }


def by_document(episodes: Iterable[Trajectory]) -> dict[str, Stats]:
    """Return the grouped stats of each document; {} for a single document."""
    return _by(episodes, lambda episode: document_of(episode.question))


def by_type(episodes: Iterable[Trajectory]) -> dict[str, Stats]:
    """Return the grouped stats of each type of question; {} for a single type."""
    return _by(episodes, lambda episode: episode.question.question_type)


def document_of(question: Question) -> str:
    """Return the file of the answer, else the document of the first gold page, else ""."""
    return question.file_name or "".join(question.gold[:1]).rpartition("_")[0]


def _by(episodes: Iterable[Trajectory], name_of: Callable[[Trajectory], str]) -> dict[str, Stats]:
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        groups[name_of(episode) or "(unknown)"].append(episode)
    keys = [
        "samples",
        *(group for f in table() if f.by_group for group in (f.key, f.coverage) if group),
    ]
    return {
        name: {key: stats.get(key) for key in keys}
        for name, group in (groups.items() if len(groups) > 1 else ())
        for stats in [compute_stats(group)]
    }
