"""What the reward asks of a judge: error spans and omissions (`mqm`), or a rubric's verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from scorekit.client import RemoteScorer, ScoringClient
from scorekit.errors import UserError
from scorekit.schemas import Failed, Info, JudgeScored, Result, Scored, Truncated, Verdict
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.score_batch import MQM, ServiceName

#: What a judge is asked once before weights are loaded: whether it has the task at all.
_PROBE = SampleForScoring("Good morning.", "Guten Morgen.", src_lang="en", tgt_lang="de")

Body = Callable[[SampleForScoring], Mapping[str, Any]]


def task_of(name: ServiceName, cfg: RewardConfig) -> str:
    """The judge's task behind one of its two names."""
    return MQM if name == MQM else cfg.judge_rubric


def body_of(name: ServiceName, cfg: RewardConfig) -> Body:
    """How a sample is put to that task."""
    if name == MQM:
        return lambda sample: replace(sample, task=MQM).wire()
    variables = cfg.judge_variables
    return lambda sample: {
        "task": cfg.judge_rubric,
        **{variable: getattr(sample, of) or "" for variable, of in variables.items()},
    }


class Judged(Scored):
    """A verdict as the score of a translation that was read whole."""

    verdict: Verdict


class JudgeScorer(RemoteScorer):
    """A judge service behind the scorer protocol: one task, and a number for each verdict."""

    def __init__(self, urls: Sequence[str], body: Body, **kwargs: Any) -> None:
        super().__init__(urls, **kwargs)
        self._body = body

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Score in order; a failed sample has None in its place."""
        return self.submit_batch(samples, cfg).result()

    def submit_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> Future[RewardOutput]:
        """The same, begun and not waited for. A judge knows no limit of tokens."""
        cfg = cfg or ScoringConfig()
        bodies = [self._body(sample) for sample in samples]
        options = {"cache": cfg.cache}

        async def judged(client: ScoringClient) -> RewardOutput:
            results = await client.score(bodies, options, batch_size=cfg.batch_size)
            found = [_scored(r, s) for r, s in zip(results, samples, strict=True)]
            return RewardOutput([r.score if r.ok else None for r in found], found)

        return self._loop.submit(judged)


def _scored(result: Result, sample: SampleForScoring) -> Scored | Failed:
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


def task_faults(name: ServiceName, info: Info, cfg: RewardConfig, higher: bool) -> list[str]:
    """What `/v1/info` of a judge says against a task. higher: the direction that is wanted."""
    task, known = task_of(name, cfg), info.tasks or {}
    if name == MQM and task not in known:
        return [f"has no task {task!r}: its /v1/info names {', '.join(known) or 'none'}"]
    if task in known and (name == MQM) != (task == MQM):
        return [f"gives no verdict for {task!r}: name another rubric in reward.judge_rubric"]
    says = known[task].higher_is_better if task in known else info.higher_is_better
    return [] if says == higher else [f"says higher_is_better={says} of {task!r}"]


def check_answer(name: ServiceName, scorer: JudgeScorer, cfg: RewardConfig, where: str) -> None:
    """Ask for one sample: whether a judge knows a rubric and its variables, only its answer tells.

    where: of the messages. Raises UserError where there is no answer, or not such as the task
    gives; ServiceUnreachable, RequestError.
    """
    task = task_of(name, cfg)
    (result,) = scorer.score_batch([_PROBE]).metadata
    if isinstance(result, Failed):
        said = f"{result.error.type}: {result.error.message}"
        raise UserError(f"{where} has no answer of the task {task!r} ({said})")
    if name == MQM and (result.error_spans is None or result.omissions is None):
        raise UserError(f"{where} gives no error spans and omissions for the task {task!r}")
