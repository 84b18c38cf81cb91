"""The stats of a search run: values of an episode, their means and titles, and how policies differ.

A stat is the mean of a value over episodes (`VALUES`). `table` has titles, formats, directions.
`compare_episodes` compares two policies on the same questions: paired differences with bootstrap
intervals, of all questions, by document, and by type of question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, Final, get_args

from scorekit.paid.account import sum_charges
from scorekit.paired import (
    PairedStat,
    indices_by_group,
    largest_changes,
)
from trainer.runs.rollout_stats import LEARNING_CURVES, OF_LEARNING
from trainer.runs.stats import Curve, Stats, StatSpec, compare_lines, mean_of
from trainer.search.images.views import CropErrorReason
from trainer.search.records import Question, Trajectory, Turn
from trainer.search.reward import NO_GOLD, reward_stats
from trainer.search.rollout.actions import DETAILS


def _part(name: str) -> Callable[[Trajectory], float | None]:
    return lambda t: t.reward.parts.get(name) if t.reward else None


def _actions(name: str) -> Callable[[Trajectory], float]:
    return lambda t: float(sum(turn.action == name for turn in own_turns(t)))


def _gold_seen(t: Trajectory) -> float | None:
    gold = t.question.gold
    return float(not set(gold).isdisjoint(t.shown_pages)) if gold else None


def _success(t: Trajectory) -> float | None:
    return None if t.success is None else float(t.success)


def _unfounded(t: Trajectory) -> float | None:
    return None if t.success is None else float(t.success and not t.answer_has_evidence)


def _tokens(t: Trajectory) -> float | None:
    tokens = [turn.tokens for turn in own_turns(t)]
    return None if None in tokens else float(sum(count for count in tokens if count is not None))


#: Stat -> the function of its value for an episode (None: no value). A share averages 0 and 1.
VALUES: Final[Mapping[str, Callable[[Trajectory], float | None]]] = {
    "reward_mean": lambda t: t.reward_value,
    "judge_mean": _part("judge"),
    "ndcg_mean": _part("ndcg"),
    "format_mean": _part("format"),
    "grounded_mean": lambda t: t.grounded.score if t.grounded else None,
    "success_share": _success,
    "success_without_evidence_share": _unfounded,
    "gold_seen_share": _gold_seen,
    "turns_mean": lambda t: float(len(own_turns(t))),
    "searches_mean": _actions("search"),
    "crops_mean": _actions("crop"),
    "invalid_mean": _actions("invalid"),
    "tokens_mean": _tokens,
    "forced_share": lambda t: float(t.forced),
    "declined_share": lambda t: float(t.end == "declined"),
    "context_share": lambda t: float(t.end == "context"),
    "failed_share": lambda t: float(t.end == "failed"),
}


def own_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that the policy wrote."""
    return [turn for turn in trajectory.turns if not turn.forced]


def values_of(trajectory: Trajectory) -> dict[str, float | None]:
    """Return all VALUES of an episode."""
    return {key: value_of(trajectory) for key, value_of in VALUES.items()}


#: The reasons of invalid turns: of their form, their box, or a refused query.
REASONS = (*DETAILS, *get_args(CropErrorReason), "query_refused")
#: Stats of the loop that a narrow console has.
_NARROW = ("policy_loss", "rollout_s", "reward_s", "update_s")
_SECONDS = ("rollout_s", "logprob_s", "reward_s", "update_s")
_MONEY = ("cost/generator_money", "cost/judge_money")
_CALLS = ("cost/generator_calls", "cost/judge_calls")


def _compared_stat(key: str, title: str, **options: Any) -> StatSpec:
    """Return a stat that two policies are compared by: the mean of a value of `values_of`."""
    return StatSpec(key=key, title=title, value_of_row=itemgetter(key), **options)


def _score(key: str, title: str, **options: Any) -> StatSpec:
    """Return a compared stat that an episode may lack; a higher one is better."""
    return _compared_stat(key, title, **{"better": "higher", "hidden_at": (None,)} | options)


def _reward(key: str, title: str, column: str, **options: Any) -> StatSpec:
    """Return a compared stat of the reward, which console, groups and pages show."""
    coverage = f"{key.removesuffix('_mean')}_coverage"
    display = {"column": column, "narrow": True, "in_console": True, "by_group": True}
    return _score(key, title, coverage=coverage, **display, **options)


def _count(key: str, title: str, **options: Any) -> StatSpec:
    """Return a stat that is a number of things."""
    return StatSpec(key=key, title=title, digits=0, **options)


_NEVER_OR_UNKNOWN = (None, 0)
_FRONT = (
    StatSpec(key="update", column="update", form="6d", narrow=True),
    _reward("reward_mean", "reward", "reward", hidden_at=()),
    StatSpec(
        key="reward_coverage",
        title="reward coverage",
        better="higher",
        column="cover",
        form="5.2f",
        narrow=True,
    ),
    _reward("ndcg_mean", "NDCG", "NDCG"),
    _reward("judge_mean", "judge's score", "judge"),
    StatSpec(
        key="judge_coverage",
        title="judge coverage",
        better="higher",
        hidden_at=_NEVER_OR_UNKNOWN,
    ),
    _score("success_share", "success", by_group=True),
    _score(
        "success_without_evidence_share", "success without evidence", better="lower", by_group=True
    ),
    _score("grounded_mean", "grounded in the pages shown"),
    _score("gold_seen_share", "a gold page was shown"),
    StatSpec(key="format_mean", title="well-formed episodes", better="higher"),
)
_BEHAVIOR = (
    _compared_stat(
        "turns_mean",
        "turns",
        digits=2,
        column="turns",
        form="5.2f",
        narrow=True,
        in_console=True,
        by_group=True,
    ),
    _compared_stat("searches_mean", "searches", digits=2),
    _compared_stat("crops_mean", "crops", digits=2),
    _compared_stat("tokens_mean", "tokens written", digits=1, hidden_at=(None,)),
    _compared_stat("invalid_mean", "invalid turns of an episode", better="lower"),
    StatSpec(
        key="invalid_share",
        title="invalid turns (share)",
        better="lower",
        hidden_at=(None,),
        column="invalid",
        in_console=True,
    ),
    *(
        _count(f"invalid_{reason}", f"  {reason}", better="lower", hidden_at=_NEVER_OR_UNKNOWN)
        for reason in REASONS
    ),
    _compared_stat("forced_share", "ended by force", better="lower", column="forced", form="6.3f"),
    StatSpec(
        key="context_share",
        title="ended by the context",
        better="lower",
        hidden_at=_NEVER_OR_UNKNOWN,
    ),
    StatSpec(key="declined_share", title="given up", hidden_at=_NEVER_OR_UNKNOWN),
    _count("no_evidence", "ended without a picture", better="lower"),
    _count("not_sent", "gold shown, not sent", better="lower", hidden_at=_NEVER_OR_UNKNOWN),
)
_SERVICES = (
    _count("answers_failed", "answers failed (generator)", better="lower"),
    _count("judgements_failed", "judgements failed", better="lower"),
    _count("search_failed", "searches failed (retriever)", better="lower"),
    _count("policy_failed", "turns failed (policy server)", hidden_at=_NEVER_OR_UNKNOWN),
    _count("reward_late", "rewards late", hidden_at=_NEVER_OR_UNKNOWN),
    _count("generator_calls", "generator's calls"),
    _count("judge_calls", "judge's calls"),
    _count("answers_known", "answers known before", hidden_at=_NEVER_OR_UNKNOWN),
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
        Curve.with_held_out("reward", "reward_mean"),
        Curve.with_held_out("NDCG", "ndcg_mean"),
        Curve.with_held_out("judge's score", "judge_mean"),
        Curve.with_held_out("success", "success_share"),
        Curve.with_held_out("success without evidence", "success_without_evidence_share"),
        Curve.with_held_out("a gold page was shown", "gold_seen_share"),
        Curve(title="coverage", keys=tuple(f"{part}_coverage" for part in parts)),
        Curve(title="groups, and those without spread", keys=("groups", "groups_without_spread")),
        Curve(
            title="groups with both success and failure (share)",
            keys=("budget_spread_expected", "budget_spread"),
        ),
        Curve(
            title="episodes of a question",
            keys=tuple(f"budget_episodes_{name}" for name in ("min", "mean", "max")),
        ),
        Curve.with_held_out("turns", "turns_mean"),
        Curve(title="searches and crops", keys=("searches_mean", "crops_mean")),
        Curve.with_held_out("invalid turns (share)", "invalid_share"),
        Curve.with_held_out("ended by force (share)", "forced_share"),
        *LEARNING_CURVES,
        Curve(title="seconds of an update", keys=_SECONDS),
        Curve(title="money since the run began", keys=_MONEY, sums=True),
        Curve(title="paid calls since the run began", keys=_CALLS, sums=True),
    )


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
    stats["not_sent"] = sum(episode.has_unsent_gold for episode in episodes)
    stats["goldless"] = sum(
        episode.reward is not None and episode.reward.error == NO_GOLD for episode in episodes
    )
    return stats | _cost(episodes)


def _cost(episodes: Sequence[Trajectory]) -> Stats:
    """Return the paid usage of episodes; a cached answer costs nothing."""
    answers = [episode.answer.charge for episode in episodes if episode.answer]
    pairs = [(episode.judged, episode.grounded) for episode in episodes]
    verdicts = [verdict.charge for pair in pairs for verdict in pair if verdict]
    return {
        "generator_calls": sum(charge.calls for charge in answers),
        "judge_calls": sum(charge.calls for charge in verdicts),
        "answers_known": sum(charge.cached for charge in answers),
        "money": sum_charges([*answers, *verdicts]).money,
    }


def document_of(question: Question) -> str:
    """Return the file of the answer, else the document of the first gold page, else ""."""
    return question.file_name or "".join(question.gold[:1]).rpartition("_")[0]


def group_names(episodes: Iterable[Trajectory], kind: str) -> list[str]:
    """Return the name of each episode's group: of its document, or of its question's type."""
    name_of = document_of if kind == "document" else attrgetter("question_type")
    return [name_of(episode.question) or "(unknown)" for episode in episodes]


def stats_by(kind: str, episodes: Sequence[Trajectory]) -> dict[str, Stats]:
    """Return the grouped stats of each "document" or "type" of question; {} for a single one."""
    keys = [
        "samples",
        *(group for f in table() if f.by_group for group in (f.key, f.coverage) if group),
    ]
    return {
        name: {key: stats.get(key) for key in keys}
        for name, indices in indices_by_group(group_names(episodes, kind)).items()
        for stats in [compute_stats([episodes[index] for index in indices])]
    }


Pair = tuple[Trajectory, Trajectory]
ALL = "all"


def compare_episodes(
    first: Sequence[Trajectory], second: Sequence[Trajectory]
) -> dict[str, list[PairedStat]]:
    """Return the stats of all questions under ALL, and some of them by type and document.

    Keys of groups are "type table" or "document sales.pdf"; a kind with one group is left out.
    first, second: an episode of each question, in the same order. Raises ValueError for different
    questions.
    """
    keys = [[(t.question.id, t.question.question) for t in side] for side in (first, second)]
    if keys[0] != keys[1]:
        raise ValueError("the two evaluations do not have the same questions in the same order")
    lines = [(values_of(a), values_of(b)) for a, b in zip(first, second, strict=True)]
    group_stats = [stat for stat in table() if stat.by_group]
    indices_by_name = {ALL: list(range(len(lines)))}
    for kind in ("type", "document"):
        groups = indices_by_group(group_names(first, kind))
        indices_by_name |= {f"{kind} {name}": indices for name, indices in groups.items()}
    return {
        name: compare_lines(
            table() if name == ALL else group_stats,
            [lines[index][0] for index in indices],
            [lines[index][1] for index in indices],
        )
        for name, indices in indices_by_name.items()
    }


def episodes_of(lines: Iterable[Mapping[str, Any]]) -> list[Trajectory]:
    """Return the examples of a report, or the lines of a dump, as episodes."""
    return [Trajectory.model_validate(line) for line in lines]


def line_key(line: Mapping[str, Any]) -> tuple[str, str]:
    """Return id and text of the question of an episode, from its line of a dump."""
    return line["question"]["id"], line["question"]["question"]


def changed_most(
    first: Sequence[Trajectory], second: Sequence[Trajectory], max_pairs: int
) -> list[tuple[str, list[Pair]]]:
    """Return (title, pairs of episodes): the greatest gains, the greatest losses, the first pairs.

    They are by reward, or by NDCG if no question has two rewards.
    max_pairs: max pairs of each.
    """
    all_pairs = list(zip(first, second, strict=True))
    first_ones = ("The first of the set", all_pairs[:max_pairs])
    for name, key in (("the reward", "reward_mean"), ("NDCG", "ndcg_mean")):
        changed = largest_changes(all_pairs, VALUES[key], f", says {name}", max_pairs)
        if changed is not None:
            return [*changed, first_ones]
    return [first_ones] if all_pairs else []
