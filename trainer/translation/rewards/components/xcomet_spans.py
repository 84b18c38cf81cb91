"""Token rewards of xCOMET's error spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

from scorekit.errors import ServiceUnreachable, UserError
from scorekit.schemas import ErrorSpan, Scored, Severity
from scorekit.scorers import SampleForScoring
from trainer.runs.stats import Curve, Stats, StatSpec, mean_of
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import Scores
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.sources import Ask
from trainer.translation.rewards.span_penalties import SpanComponent

#: Severities with a separate stat; all others are counted together, as UNKNOWN.
SEVERITIES = get_args(Severity)
_PROBE = SampleForScoring("Good morning.", "Guten Morgen.")


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


class XCOMETSpans(SpanComponent):
    """Component: w_xcomet_span times the penalty of each token inside a span."""

    name = "xcomet_spans"
    weight_key = "w_xcomet_span"
    service = "xcomet"
    table = (
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
    )
    curves = (
        Curve(
            title="error spans a segment, by severity",
            keys=("spans_MINOR_mean", "spans_MAJOR_mean", "spans_CRITICAL_mean"),
        ),
        Curve.with_held_out("error spans a segment", "spans_mean"),
        Curve(title="token reward of spans", keys=("token_rewards_mean",)),
    )

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
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

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the spans; None if they are unknown."""
        spans = reward.error_spans
        return {"error_spans": None if spans is None else [span.model_dump() for span in spans]}


def without_spans(scores: Scores, cfg: RewardConfig) -> RewardConfig:
    """Return the config without the span weight if the scorer gives no spans: evaluation still
    works."""
    results = scores.results.get("xcomet", [])
    scored = [result for result in results if isinstance(result, Scored)]
    if results and all(result.error_spans is not None for result in scored):
        return cfg
    return cfg.model_copy(update={"w_xcomet_span": 0.0})


def check_spans(ask: Ask, cfg: RewardConfig) -> None:
    """Raise UserError if spans are rewarded and the model marks none: only an answer shows it.

    If no answer is available now, the check is skipped: the run will wait for the service.
    """
    if not XCOMETSpans().weight(cfg):
        return
    try:
        (result,) = ask("xcomet", [_PROBE]).result().metadata
    except ServiceUnreachable:
        return
    if isinstance(result, Scored) and result.error_spans is None:
        raise UserError(
            f"{cfg.urls_key('xcomet')}: the model there marks no error spans. Set "
            "reward.w_xcomet_span to 0, or name one that does (xCOMET)"
        )


def _severity(span: ErrorSpan) -> str:
    """Return the severity as named in `severity_weights`."""
    severity = span.severity.upper()
    return severity if severity in SEVERITIES else "UNKNOWN"
