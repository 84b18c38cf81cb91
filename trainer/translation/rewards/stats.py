"""The stats and dump fields of a reward's parts, from the answers of their services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from scorekit.credit.spans import severity_weight
from scorekit.rewards.violations import VIOLATIONS
from scorekit.schemas import ErrorSpan, JudgeScored, Scored, Severity
from trainer.runs.stats import Curve, Stats, StatSpec, mean_of, mean_std
from trainer.translation.rewards import metricx_reward
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import COMPOSITE, MQM, VERDICT, Composed, ServiceName
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.short_form import SERVICES, needed_services

#: Severities with a separate stat; all others are counted together, as UNKNOWN.
SEVERITIES = get_args(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """Describes what is logged, drawn and dumped of one part of the reward.

    service: whose answers it reads; None: it is of the text alone.
    table, curves: its stats, in the order of display, and its charts.
    stats: returns the stats for a line of log.jsonl or eval.jsonl.
    dump_fields: returns the fields for a line of a dump of completions.
    """

    service: ServiceName | None
    table: tuple[StatSpec, ...]
    curves: tuple[Curve, ...]
    stats: Callable[[Sequence[SampleReward], RewardConfig], Stats]
    dump_fields: Callable[[SampleReward], dict[str, Any]]

    def is_shown(self, rewards: Sequence[SampleReward]) -> bool:
        """Return whether it has stats and fields: if its service is optional, only if that was
        requested for one of these samples."""
        if self.service is None or not SERVICES[self.service].optional:
            return True
        return any(self.service in reward.services for reward in rewards)


def hidden_keys(cfg: RewardConfig) -> set[str]:
    """Return the stats that have no column: of optional parts without a weight."""
    needed = needed_services(cfg)
    return {
        stat.key
        for part in PARTS
        for stat in part.table
        if (
            part.service not in needed and SERVICES[part.service].optional
            if part.service is not None
            else part is _CHRF and not cfg.w_chrf
        )
    }


# -- services --------------------------------------------------------------------------------------


def coverage_stats(service: ServiceName, rewards: Sequence[SampleReward]) -> Stats:
    """Return `{service}_coverage` and `{service}_truncated_frac`.

    The share of the requested samples that it scored; and the share of those that the model could
    not read completely.
    """
    flags = [reward.truncated(service) for reward in rewards if service in reward.services]
    return {
        f"{service}_coverage": mean_of([flag is not None for flag in flags]),
        f"{service}_truncated_frac": mean_of([flag for flag in flags if flag is not None]),
    }


def _score_stat(
    service: ServiceName,
    title: str,
    better: Literal["higher", "lower"],
    column: str,
    *,
    hidden_at: tuple[float | None, ...] = (),
    narrow: bool = True,
    ranks: str = "",
) -> StatSpec:
    """Return the mean of a service's scores, with its coverage, for console and tables."""
    return StatSpec(
        key=f"{service}_score_mean",
        title=title,
        better=better,
        hidden_at=hidden_at,
        column=column,
        narrow=narrow,
        in_console=True,
        by_group=True,
        coverage=f"{service}_coverage",
        value_of_row=lambda line: line.get(f"{service}_score"),
        ranks=ranks,
    )


def _scores(service: ServiceName, rewards: Iterable[SampleReward]) -> list[float]:
    return [score for reward in rewards if (score := reward.score(service)) is not None]


def _score_stats(service: ServiceName, rewards: Sequence[SampleReward], _: RewardConfig) -> Stats:
    scores = mean_std(f"{service}_score", _scores(service, rewards))
    return scores | coverage_stats(service, rewards)


def _score_fields(service: ServiceName, reward: SampleReward) -> dict[str, Any]:
    """Return the score, and whether the model read the full text."""
    return {
        f"{service}_score": reward.score(service),
        f"{service}_truncated": reward.truncated(service),
    }


def _metricx_stats(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
    scores = _scores("metricx", rewards)
    values = [metricx_reward(score, cfg.metricx_offset) for score in scores]
    stats = mean_std("metricx_score", scores) | mean_std("metricx_reward", values)
    return stats | coverage_stats("metricx", rewards)


_METRICX = RewardPart(
    service="metricx",
    table=(
        _score_stat("metricx", "MetricX score", "lower", "metricx", ranks="MetricX"),
        StatSpec(key="metricx_score_std", column="± mx", form="6.3f"),
        StatSpec(
            key="metricx_reward_mean", title="MetricX reward", better="higher", column="mx_rew"
        ),
        StatSpec(key="metricx_reward_std", column="± mx_r", form="6.3f"),
        StatSpec(key="metricx_coverage", title="MetricX coverage", better="higher"),
    ),
    curves=(Curve.with_held_out("MetricX score (lower is better)", "metricx_score_mean"),),
    stats=_metricx_stats,
    dump_fields=partial(_score_fields, "metricx"),
)

_XCOMET = RewardPart(
    service="xcomet",
    table=(
        _score_stat("xcomet", "xCOMET score", "higher", "xcomet", ranks="xCOMET"),
        StatSpec(key="xcomet_score_std", column="± xc", form="6.3f"),
        StatSpec(key="xcomet_coverage", title="xCOMET coverage", better="higher"),
    ),
    curves=(Curve.with_held_out("xCOMET score", "xcomet_score_mean"),),
    stats=partial(_score_stats, "xcomet"),
    dump_fields=partial(_score_fields, "xcomet"),
)


def _judge_fields(reward: SampleReward) -> dict[str, Any]:
    answer = reward.answers.get(VERDICT)
    verdict = answer.verdict.model_dump() if isinstance(answer, JudgeScored) else None
    return {"judge_score": reward.score(VERDICT), "judge_verdict": verdict}


_JUDGE = RewardPart(
    service=VERDICT,
    table=(
        _score_stat(VERDICT, "judge's score", "higher", "judge", hidden_at=(None,)),
        StatSpec(key="judge_score_std", hidden_at=(None,), column="± jd", form="6.3f"),
        StatSpec(key="judge_coverage", title="judge coverage", better="higher", hidden_at=(None,)),
    ),
    curves=(Curve.with_held_out("judge's score", "judge_score_mean"),),
    stats=partial(_score_stats, VERDICT),
    dump_fields=_judge_fields,
)


def _composed_stats(reward: SampleReward) -> dict[str, float]:
    answer = reward.answers.get(COMPOSITE)
    return answer.stats if isinstance(answer, Composed) else {}


def _definition_stats(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
    """Return the stats of the reward, and the mean of each component and closed gate."""
    rows = [_composed_stats(reward) for reward in rewards]
    names = dict.fromkeys(name for row in rows for name in row)
    return _score_stats(COMPOSITE, rewards, cfg) | {
        f"definition_{name.replace('/', '_')}_mean": mean_of(
            [row[name] for row in rows if name in row]
        )
        for name in names
    }


_DEFINITION = RewardPart(
    service=COMPOSITE,
    table=(
        _score_stat(COMPOSITE, "composite reward", "higher", "comp", hidden_at=(None,)),
        StatSpec(key="definition_score_std", hidden_at=(None,), column="± comp", form="6.3f"),
        StatSpec(
            key="definition_coverage",
            title="composite coverage",
            better="higher",
            hidden_at=(None,),
        ),
    ),
    curves=(Curve.with_held_out("composite reward", "definition_score_mean"),),
    stats=_definition_stats,
    dump_fields=lambda reward: (
        _score_fields(COMPOSITE, reward) | {"definition_stats": _composed_stats(reward)}
    ),
)


# -- spans and omissions ---------------------------------------------------------------------------


def _spans(line: Mapping[str, Any], severity: str | None = None) -> float | None:
    spans = line["error_spans"]
    if spans is None:
        return None
    return sum(severity in (None, span["severity"]) for span in spans)


def _severity_stat(severity: str, column: str) -> StatSpec:
    return StatSpec(
        key=f"spans_{severity}_mean",
        title=f"· {severity.lower()}",
        digits=2,
        better="lower",
        column=column,
        form="6.2f",
        value_of_row=partial(_spans, severity=severity),
    )


def _severity(span: ErrorSpan) -> str:
    """Return the severity as named in `severity_weights`."""
    severity = span.severity.upper()
    return severity if severity in SEVERITIES else "UNKNOWN"


def _span_stats(rewards: Sequence[SampleReward], _: RewardConfig) -> Stats:
    """Return the numbers of spans of a segment, by severity."""
    spans = [r.error_spans for r in rewards if r.error_spans is not None]
    severities = [[_severity(span) for span in sample_spans] for sample_spans in spans]
    return {
        "spans_mean": mean_of([len(sample_spans) for sample_spans in spans]),
        **{
            f"spans_{severity}_mean": mean_of([row.count(severity) for row in severities])
            for severity in (*SEVERITIES, "UNKNOWN")
        },
    }


def _span_fields(reward: SampleReward) -> dict[str, Any]:
    """Return the spans; None if they are unknown."""
    spans = reward.error_spans
    return {"error_spans": None if spans is None else [span.model_dump() for span in spans]}


_SPANS = RewardPart(
    service="xcomet",
    table=(
        StatSpec(key="token_rewards_mean", column="tokens"),
        StatSpec(key="token_rewards_std", column="± tok", form="6.3f"),
        StatSpec(key="token_rewards_nonzero_frac", column="not 0", form="6.3f"),
        StatSpec(
            key="spans_mean",
            title="error spans a segment",
            digits=2,
            better="lower",
            column="spans",
            form="6.2f",
            narrow=True,
            in_console=True,
            by_group=True,
            value_of_row=_spans,
        ),
        _severity_stat("MINOR", "minor"),
        _severity_stat("MAJOR", "major"),
        _severity_stat("CRITICAL", "crit"),
        StatSpec(
            key="spans_UNKNOWN_mean",
            title="· other",
            digits=2,
            better="lower",
            hidden_at=(None, 0.0),  # our services have no others
            column="other",
            form="6.2f",
        ),
    ),
    curves=(
        Curve(
            title="error spans a segment, by severity",
            keys=("spans_MINOR_mean", "spans_MAJOR_mean", "spans_CRITICAL_mean"),
        ),
        Curve.with_held_out("error spans a segment", "spans_mean"),
        Curve(title="token reward of spans", keys=("token_rewards_mean",)),
    ),
    stats=_span_stats,
    dump_fields=_span_fields,
)


def _count(line: Mapping[str, Any], key: str) -> float | None:
    entries = line.get(key)
    return None if entries is None else len(entries)


def _count_stat(key: str, title: str, column: str = "", *, in_console: bool = False) -> StatSpec:
    """Return the mean number of entries of a list in the dump.

    in_console: whether it is printed for an evaluation, and in the table by groups.
    """
    return StatSpec(
        key=f"{key}_mean",
        title=title,
        digits=2,
        better="lower",
        hidden_at=(None,),
        column=column,
        form="6.2f",
        narrow=bool(column),
        in_console=in_console,
        by_group=in_console,
        value_of_row=partial(_count, key=key),
    )


def _answers(rewards: Iterable[SampleReward]) -> list[Scored]:
    return [answer for reward in rewards if (answer := reward.answer(MQM)) is not None]


def _plain(reward: SampleReward, field: str) -> list[dict[str, Any]] | None:
    """Return a field of the answer for a dump; None if the sample has no answer."""
    answer = reward.answers.get(MQM)
    return (
        None if answer is None else [entry.model_dump() for entry in getattr(answer, field) or ()]
    )


def _mqm_stats(rewards: Sequence[SampleReward], _: RewardConfig) -> Stats:
    answers = _answers(rewards)
    return {
        **mean_std("mqm_score", [answer.score for answer in answers]),
        "mqm_spans_mean": mean_of([len(answer.error_spans or ()) for answer in answers]),
        "mqm_unplaced_mean": mean_of([len(answer.unplaced or ()) for answer in answers]),
        **coverage_stats(MQM, rewards),
    }


def _omission_stats(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
    """Return stats of the scored samples, before the weight."""
    answers = _answers(rewards)
    return {
        "omissions_mean": mean_of([len(answer.omissions or ()) for answer in answers]),
        "omission_penalty_mean": mean_of([omission_penalty(answer, cfg) for answer in answers]),
    }


def omission_penalty(answer: Scored, cfg: RewardConfig) -> float:
    """Return the sum of the severities' weights of all omissions.

    Raises UserError for a severity without a weight.
    """
    weights = cfg.severity_weights.model_dump()
    return sum((severity_weight(o.severity, weights) for o in answer.omissions or ()), 0.0)


_MQM = RewardPart(
    service=MQM,
    table=(
        _score_stat(MQM, "MQM score", "lower", "mqm", hidden_at=(None,), narrow=False),
        _count_stat("mqm_spans", "MQM errors a segment", column="mqm_sp"),
        _count_stat("mqm_unplaced", "MQM errors without a position"),
        StatSpec(key="mqm_coverage", title="MQM coverage", better="higher", hidden_at=(None,)),
    ),
    curves=(Curve.with_held_out("MQM errors a segment", "mqm_spans_mean"),),
    stats=_mqm_stats,
    dump_fields=lambda reward: {
        "mqm_score": reward.score(MQM),
        "mqm_spans": _plain(reward, "error_spans"),
        "mqm_unplaced": _plain(reward, "unplaced"),
    },
)

_OMISSIONS = RewardPart(
    service=MQM,
    table=(
        _count_stat("omissions", "omissions a segment", column="omit", in_console=True),
        StatSpec(
            key="omission_penalty_mean",
            title="penalty of omissions",
            digits=2,
            better="higher",
            hidden_at=(None,),
            column="om_pen",
            form="6.2f",
        ),
    ),
    curves=(Curve.with_held_out("omissions a segment", "omissions_mean"),),
    stats=_omission_stats,
    dump_fields=lambda reward: {"omissions": _plain(reward, "omissions")},
)


# -- rules of the text -----------------------------------------------------------------------------


def _guard_value(line: Mapping[str, Any], name: str) -> float | None:
    return (line.get("guards") or {}).get(name)


def _guard_stats(rewards: Sequence[SampleReward], _: RewardConfig) -> Stats:
    """Return the mean value of each guard over all samples, also those without a score.

    None for a guard that is off.
    """
    return {
        f"{key}_mean": mean_of([r.values[key] for r in rewards if key in r.values])
        for key in (f"guard_{name}" for name in VIOLATIONS)
    }


def _guard_fields(reward: SampleReward) -> dict[str, Any]:
    """Return guard -> value."""
    values = {name: reward.values.get(f"guard_{name}") for name in VIOLATIONS}
    return {"guards": {name: value for name, value in values.items() if value is not None}}


_GUARDS = RewardPart(
    service=None,
    table=tuple(
        StatSpec(
            key=f"guard_{name}_mean",
            title=f"guard: {name}",
            better="lower",
            hidden_at=(None,),
            value_of_row=partial(_guard_value, name=name),
        )
        for name in VIOLATIONS
    ),
    curves=(
        Curve(
            title="values of the guards",
            keys=tuple(f"guard_{name}_mean" for name in VIOLATIONS),
        ),
    ),
    stats=_guard_stats,
    dump_fields=_guard_fields,
)


def _chrf_stats(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
    if not cfg.w_chrf:
        return {}
    return mean_std("chrf_reward", [reward.values["chrf"] for reward in rewards])


_CHRF = RewardPart(
    service=None,
    table=(
        StatSpec(
            key="chrf_reward_mean", hidden_at=(None,), column="chrf", form="6.2f", narrow=True
        ),
        StatSpec(key="chrf_reward_std", hidden_at=(None,), column="± chrf", form="6.2f"),
    ),
    curves=(Curve(title="chrF of the samples (a reward)", keys=("chrf_reward_mean",)),),
    stats=_chrf_stats,
    dump_fields=lambda reward: {"chrf": reward.values["chrf"]} if "chrf" in reward.values else {},
)

#: In the order of tables, pages and dumps.
PARTS = (_METRICX, _XCOMET, _SPANS, _MQM, _OMISSIONS, _JUDGE, _DEFINITION, _GUARDS, _CHRF)
