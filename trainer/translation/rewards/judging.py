"""Rewards from a judge: error spans and omissions (`mqm`), or the verdict of a rubric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from scorekit.client import RemoteScorer, ScoringClient
from scorekit.errors import UserError
from scorekit.schemas import Failed, Info, JudgeScored, Result, Scored, Truncated, Verdict
from scorekit.scorers import (
    RewardOutput,
    SampleForScoring,
    ScorerSample,
    ScoringConfig,
    as_samples,
    as_scoring_config,
)
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import MQM, ServiceName

#: A sample to check before weights are loaded that a judge has the task.
_PROBE = SampleForScoring("Good morning.", "Guten Morgen.", src_lang="en", tgt_lang="de")

Body = Callable[[SampleForScoring], Mapping[str, Any]]


def task_of(name: ServiceName, cfg: RewardConfig) -> str:
    """Return the judge's task for one of its two service names."""
    return MQM if name == MQM else cfg.judge_rubric


def body_of(name: ServiceName, cfg: RewardConfig) -> Body:
    """Return the function that makes the request body of a sample for that task."""
    if name == MQM:
        return lambda sample: replace(sample, task=MQM).wire()
    variables = cfg.judge_variables
    return lambda sample: {
        "task": cfg.judge_rubric,
        **{variable: getattr(sample, field) or "" for variable, field in variables.items()},
    }


class Judged(Scored):
    """A verdict as the score of a translation, which a judge reads completely."""

    verdict: Verdict


class JudgeScorer(RemoteScorer):
    """A judge service as a scorer: one task, and a number for each verdict."""

    def __init__(self, urls: Sequence[str], body: Body, **kwargs: Any) -> None:
        super().__init__(urls, **kwargs)
        self._body = body

    def score_batch(
        self,
        samples: Iterable[ScorerSample],
        cfg: ScoringConfig | Mapping[str, Any] | None = None,
    ) -> RewardOutput:
        """Score in order; a failed sample has None in its place."""
        return self.submit_batch(samples, cfg).result()

    def submit_batch(
        self,
        samples: Iterable[ScorerSample],
        cfg: ScoringConfig | Mapping[str, Any] | None = None,
    ) -> Future[RewardOutput]:
        """Start `score_batch` and return its future. A judge has no token limit."""
        chosen, scoring = as_samples(samples), as_scoring_config(cfg)
        bodies = [self._body(sample) for sample in chosen]
        options = {"cache": scoring.cache}

        async def score(client: ScoringClient) -> RewardOutput:
            results = await client.score(bodies, options, batch_size=scoring.batch_size)
            outcomes = [_as_scored(r, s) for r, s in zip(results, chosen, strict=True)]
            return RewardOutput([r.score if r.ok else None for r in outcomes], outcomes)

        return self.submit(score)


def _as_scored(result: Result, sample: SampleForScoring) -> Scored | Failed:
    if not isinstance(result, JudgeScored):
        return result
    return Judged(
        id=result.id,
        ok=True,
        score=result.score,
        tokens=0,
        truncated=Truncated(src=False, mt=False),
        mt_covered=len(sample.mt),
        cached=result.cached,
        usage=result.usage,
        upstream_calls=result.upstream_calls,
        verdict=result.verdict,
    )


def task_errors(name: ServiceName, info: Info, cfg: RewardConfig, higher: bool) -> list[str]:
    """Return what `/v1/info` of a judge lacks for a task.

    higher: the expected direction.
    """
    task, tasks = task_of(name, cfg), info.tasks or {}
    if name == MQM and task not in tasks:
        return [f"has no task {task!r}: its /v1/info names {', '.join(tasks) or 'none'}"]
    if task in tasks and (name == MQM) != (task == MQM):
        return [f"gives no verdict for {task!r}. Name another rubric in reward.judge_rubric"]
    higher_is_better = tasks[task].higher_is_better if task in tasks else info.higher_is_better
    return (
        []
        if higher_is_better == higher
        else [f"says higher_is_better={higher_is_better} of {task!r}"]
    )


def check_answer(name: ServiceName, scorer: JudgeScorer, cfg: RewardConfig, prefix: str) -> None:
    """Send one sample: only the answer shows whether a judge has a rubric and its variables.

    prefix: of the error messages.
    Raises UserError if there is no answer, or one of the wrong form; ServiceUnreachable,
    RequestError.
    """
    task = task_of(name, cfg)
    (result,) = scorer.score_batch([_PROBE]).metadata
    if isinstance(result, Failed):
        reason = f"{result.error.type}: {result.error.message}"
        raise UserError(f"{prefix} has no answer of the task {task!r} ({reason})")
    if name == MQM and (result.error_spans is None or result.omissions is None):
        raise UserError(f"{prefix} gives no error spans and omissions for the task {task!r}")
