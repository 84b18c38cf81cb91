"""Scorers beside the metrics: a judge, the reward of a definition, and a class in this process.

A judge marks errors and omissions (`mqm`), or gives the verdict of a rubric.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from scorekit.client import RemoteScorer, ScoringClient
from scorekit.client.remote import resolve_scorer, scorer_class
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    RequestError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.rewards import CompositeReward, RewardDefinition, RewardResult, SyncCompositeReward
from scorekit.schemas import Failed, Info, JudgeScored, Result, Scored, Truncated, Verdict
from scorekit.scorers import (
    RewardOutput,
    SampleForScoring,
    Scorer,
    ScorerSample,
    ScoringConfig,
    as_samples,
    as_scoring_config,
    reward_output,
)
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import (
    BAD_SOURCE,
    CLOSED_GATE,
    MQM,
    ServiceName,
    failure,
)

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


#: Local rules that need what a sample of this trainer does not carry, and the key to use instead.
_OTHER_KEYS = {"chrf": "w_chrf", "truncated": "no_eos_penalty"}


class Composed(Scored):
    """A composite reward as the score of a translation.

    stats: raw values of its components, and 1 or 0 for each closed gate.
    """

    stats: dict[str, float]


class CompositeScorer:
    """Scores translations by a reward definition. Groups of many callers share requests."""

    def __init__(self, definition: RewardDefinition, key: str, *, caching: bool = True) -> None:
        """Check the definition and its services.

        key: config key, for errors. caching: whether services use their score cache.
        Raises UserError if a service does not answer or fit, or if the definition needs what this
        trainer does not give.
        """
        _check_inputs(definition, key)
        self._reward = SyncCompositeReward(definition if caching else _without_cache(definition))
        try:
            #: What each component's service is.
            self.infos: dict[str, Info] = self._reward.check()
        except (ServiceUnreachable, RequestError, UserError) as error:
            self._reward.close()
            raise UserError(f"{key}: {error}") from None

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        self._reward.close()

    def submit_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig
    ) -> Future[RewardOutput]:
        """Start scoring and return the future. The definition has its own options."""

        async def score(reward: CompositeReward) -> RewardOutput:
            results = await reward.score(samples)
            return reward_output(
                [_as_composed(r, s) for r, s in zip(results, samples, strict=True)]
            )

        return self._reward.submit(score)


def _check_inputs(definition: RewardDefinition, key: str) -> None:
    if definition.token_rewards is not None:
        raise UserError(
            f"{key}.token_rewards: tokens are rewarded by the keys of a run's reward in this "
            "trainer. Use reward.w_xcomet_span or reward.w_mqm_span"
        )
    for name, component in definition.components.items():
        if component.is_group_rule:
            raise UserError(
                f"{key}.components.{name}: rules of groups do not exist in this trainer. Remove it"
            )
        if component.reference:
            raise UserError(
                f"{key}.components.{name}.reference: services get no reference in this trainer. "
                "Remove it"
            )
        if other_key := _OTHER_KEYS.get(component.rule or ""):
            raise UserError(
                f"{key}.components.{name}: use reward.{other_key} in place of `{component.rule}`"
            )


def _without_cache(definition: RewardDefinition) -> RewardDefinition:
    components = {
        name: component
        if component.service is None
        else component.model_copy(update={"options": component.options | {"cache": False}})
        for name, component in definition.components.items()
    }
    return definition.model_copy(update={"components": components})


def _as_composed(result: RewardResult, sample: SampleForScoring) -> Scored | Failed:
    answers = [c.answer for c in result.components.values() if isinstance(c.answer, Scored)]
    if result.reward is None:
        return _no_reward(result)
    return Composed(
        id=None,
        ok=True,
        score=result.reward,
        tokens=0,
        truncated=Truncated(
            src=any(answer.truncated.src for answer in answers),
            mt=any(answer.truncated.mt for answer in answers),
        ),
        mt_covered=min((answer.mt_covered for answer in answers), default=len(sample.mt)),
        cached=bool(answers) and all(answer.cached for answer in answers),
        stats=result.stats(),
    )


def _no_reward(result: RewardResult) -> Failed:
    """Return why there is no reward. A closed gate is no error of the text: it has no penalty."""
    missing = [c for c in result.components.values() if c.weight and c.status != "ok"]
    statuses = [component.status for component in missing if component.status != "skipped"]
    type = statuses[0] if statuses else CLOSED_GATE
    for status in (*TEXT_ERROR_TYPES, BAD_SOURCE):
        if status in statuses:
            type = status
    return failure(type, result.reason or "no reward", retryable=result.is_transient)


#: Largest number of cached scores; the least recently used are dropped.
_MAX_CACHED = 16_384


def load_scorer(
    key: str, target: str, offered: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Scorer, set[str]]:
    """Return the scorer of `module:Class`, and the names of the offered arguments that it got.

    key: of the config, without its ending (`reward.metricx`).
    offered: arguments that it gets if it has a parameter of that name, they are not None, and
    `arguments` (the user's) does not set it.
    Raises UserError.
    """
    module, colon, class_name = target.partition(":")
    names = [*module.split("."), class_name]
    if not colon or not all(part.isidentifier() for part in names):
        raise UserError(
            f"{key}_urls: {target!r}: expected a URL with http:// or https://, or a scorer in this "
            "process as module:Class"
        )
    try:
        parameters = inspect.signature(scorer_class(target)).parameters
        accepted = {
            name: value
            for name, value in offered.items()
            if name in parameters and name not in arguments and value is not None
        }
        return resolve_scorer(target, **accepted, **arguments), set(accepted)
    except UserError as error:
        raise UserError(f"{key}_urls, {key}_scorer_args: {error}") from None


class ThreadScorer:
    """A scorer in this process that runs in its own thread.

    It scores one group after another, because a model may not support two callers. The thread is a
    daemon, so that it does not delay a Ctrl-C.
    Its scores are cached if the config of a batch allows it, and equal samples of a batch are
    scored once. Every batch has to have the same options.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer  # owner: the thread, as of `_cache`; callers only put and close
        self._cache: OrderedDict[SampleForScoring, Scored] = OrderedDict()
        self._work: SimpleQueue[Any] = SimpleQueue()
        #: Its description of itself, if it has one.
        self.description = getattr(scorer, "description", None)
        threading.Thread(target=self._run, name="trainer-scorer", daemon=True).start()

    def submit_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig
    ) -> Future[RewardOutput]:
        """Start `score_batch` after everything that was submitted before."""
        future: Future[RewardOutput] = Future()
        self._work.put((future, samples, cfg))
        return future

    def close(self) -> None:
        """End the thread after everything that was submitted."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, samples, cfg = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._score(samples, cfg))
                except BaseException as error:
                    future.set_exception(error)

    def _score(self, samples: Sequence[SampleForScoring], cfg: ScoringConfig) -> RewardOutput:
        if not cfg.cache:
            return self._scorer.score_batch(samples, cfg)
        results: dict[SampleForScoring, Scored | Failed] = {}
        missing = []
        for sample in dict.fromkeys(samples):
            if sample in self._cache:
                self._cache.move_to_end(sample)
                results[sample] = self._cache[sample]
            else:
                missing.append(sample)
        if missing:
            scored = self._scorer.score_batch(missing, cfg).metadata
            if len(scored) != len(missing):
                raise ScorekitError(
                    f"the scorer returned {len(scored)} results for {len(missing)} samples"
                )
            for sample, result in zip(missing, scored, strict=True):
                results[sample] = result
                if isinstance(result, Scored):
                    self._cache[sample] = result.model_copy(update={"cached": True})
        while len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return reward_output([results[sample] for sample in samples])
