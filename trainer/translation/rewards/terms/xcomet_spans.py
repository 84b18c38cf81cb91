"""The tokens inside xCOMET's error spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

from scorekit.errors import ServiceUnreachable, UserError
from scorekit.schemas import ErrorSpan, Scored, Severity
from scorekit.scorers import SampleForScoring
from trainer.runs.figures import Curve, Figure, Figures, mean_of
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.score_batch import Scores
from trainer.translation.rewards.sources import Ask
from trainer.translation.rewards.span_charges import charge_spans
from trainer.translation.rewards.term import Term
from trainer.translation.rollouts import TranslationRollout

#: Severities that have a figure each; all other words are counted together, as UNKNOWN.
SEVERITIES = get_args(Severity)
_PROBE = SampleForScoring("Good morning.", "Guten Morgen.")


def _spans(line: Mapping[str, Any], severity: str | None = None) -> float | None:
    spans = line["error_spans"]
    if spans is None:
        return None
    return sum(severity in (None, span["severity"]) for span in spans)


def _of_severity(severity: str, column: str) -> Figure:
    return Figure(
        key=f"spans_{severity}_mean",
        title=f"· {severity.lower()}",
        digits=2,
        better="lower",
        column=column,
        form="6.2f",
        of_line=partial(_spans, severity=severity),
    )


class XCOMETSpans(Term):
    """w_xcomet_span times the penalty of each token inside a span."""

    name = "xcomet_spans"
    service = "xcomet"
    table = (
        Figure(key="token_rewards_mean", column="tokens"),
        Figure(key="token_rewards_std", column="± tok", form="6.3f"),
        Figure(key="token_rewards_nonzero_frac", column="not 0", form="6.3f"),
        Figure(
            key="spans_mean",
            title="error spans a segment",
            digits=2,
            better="lower",
            column="spans",
            form="6.2f",
            narrow=True,
            said=True,
            by_group=True,
            of_line=_spans,
        ),
        _of_severity("MINOR", "minor"),
        _of_severity("MAJOR", "major"),
        _of_severity("CRITICAL", "crit"),
        Figure(
            key="spans_UNKNOWN_mean",
            title="· other",
            digits=2,
            better="lower",
            hidden_at=(None, 0.0),  # our services know no others
            column="other",
            form="6.2f",
        ),
    )
    curves = (
        Curve(
            title="error spans a segment, by severity",
            keys=("spans_MINOR_mean", "spans_MAJOR_mean", "spans_CRITICAL_mean"),
        ),
        Curve(title="error spans a segment", keys=("spans_mean",), held_out="spans_mean"),
        Curve(title="token reward of spans", keys=("token_rewards_mean",)),
    )

    def weight(self, cfg: RewardConfig) -> float:
        """w_xcomet_span, where any severity has a weight."""
        return cfg.w_xcomet_span if any(cfg.severity_weights.model_dump().values()) else 0.0

    def earn(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """To the tokens; and which of them the model has read."""
        charge_spans(reward, rollout, cfg, "xcomet", cfg.w_xcomet_span)

    def figures(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
        """Spans of a segment, by severity."""
        spans = [r.error_spans for r in rewards if r.error_spans is not None]
        named = [[_severity(span) for span in of_sample] for of_sample in spans]
        return {
            "spans_mean": mean_of([len(of_sample) for of_sample in spans]),
            **{
                f"spans_{severity}_mean": mean_of([row.count(severity) for row in named])
                for severity in (*SEVERITIES, "UNKNOWN")
            },
        }

    def dumped(self, reward: SampleReward) -> dict[str, Any]:
        """The spans; None where they are not known."""
        spans = reward.error_spans
        return {"error_spans": None if spans is None else [span.model_dump() for span in spans]}


def without_spans(scores: Scores, cfg: RewardConfig) -> RewardConfig:
    """The same, but for the spans where the scorer gives none: it can be looked at all the same."""
    results = scores.results.get("xcomet", [])
    scored = [result for result in results if isinstance(result, Scored)]
    if results and all(result.error_spans is not None for result in scored):
        return cfg
    return cfg.model_copy(update={"w_xcomet_span": 0.0})


def check_spans(ask: Ask, cfg: RewardConfig) -> None:
    """Raise UserError where spans are rewarded and the model marks none: only an answer tells. One
    that cannot be had now is waited for where the run needs it."""
    if not XCOMETSpans().weight(cfg):
        return
    try:
        (result,) = ask("xcomet", [_PROBE]).result().metadata
    except ServiceUnreachable:
        return
    if isinstance(result, Scored) and result.error_spans is None:
        raise UserError(
            f"{cfg.urls_key('xcomet')}: the model there marks no error spans: set "
            "reward.w_xcomet_span to 0, or name one that does (xCOMET)"
        )


def _severity(span: ErrorSpan) -> str:
    """As the weights of `severity_weights` are named."""
    severity = span.severity.upper()
    return severity if severity in SEVERITIES else "UNKNOWN"
