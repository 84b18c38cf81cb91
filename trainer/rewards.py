"""Rewards of rollouts: asks both services at once, and keeps failures apart from scores."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from scorekit.client import RemoteScorer
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    RequestError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.schemas import ErrorSpan, Failed, Info, Scored, WireError
from scorekit.scorers import (
    RewardOutput,
    SampleForScoring,
    Scorer,
    ScoringConfig,
    resolve_scorer,
)
from trainer.config import RewardConfig
from trainer.credit import covered_tokens, spans_to_token_rewards
from trainer.guards import guard_faults, guard_penalty
from trainer.sampler import Rollout

log = logging.getLogger(__name__)
T = TypeVar("T")
ServiceName = Literal["metricx", "xcomet"]
SERVICES: tuple[ServiceName, ...] = ("metricx", "xcomet")
#: Which direction of the score the reward's formula takes for granted.
HIGHER_IS_BETTER = {"metricx": False, "xcomet": True}
#: Seconds that a request to a service without weight may take, retries included: it is only shown.
_SHOWN_DEADLINE_S = 10.0
#: Share of samples that a model may fail to read whole before it is told.
_TRUNCATED_TOLD = 0.1


class RewardFailure(ScorekitError):
    """A score could not be had, and `reward.on_failure` is `fail`."""


@dataclass(slots=True)
class SampleReward:
    """What one completion earned.

    r_seq: sequence reward; None: a service failed, the sample takes no part in the update.
    token_rewards: span term of each token, already weighted.
    valid: tokens whose reward is known whole; False behind what the span model could read.
    metricx_score, xcomet_score: the models' own scores; None where not asked or failed.
    error_spans: None where not asked or failed.
    metricx_truncated, xcomet_truncated: whether the model read less than the whole source and
    translation; None where not asked or failed.
    asked: services that were asked for this sample.
    text_error: why the text could not be scored by its own fault; service_error: why a service
    gave no score.
    guards: fault of each guard that was asked for (trainer/guards.py), 0 to 1.
    """

    r_seq: float | None
    token_rewards: list[float]
    valid: list[bool]
    metricx_score: float | None = None
    xcomet_score: float | None = None
    error_spans: list[ErrorSpan] | None = None
    metricx_truncated: bool | None = None
    xcomet_truncated: bool | None = None
    asked: tuple[ServiceName, ...] = ()
    text_error: str | None = None
    service_error: str | None = None
    guards: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Scores:
    """Raw answers: results of each service that was asked, in the order of the samples."""

    results: dict[ServiceName, list[Scored | Failed]] = field(default_factory=dict)


class Rewarder:
    """The reward services of a run.

    Opening it checks that each service that is needed answers, runs the model that the config
    expects, and scores in the expected direction. A service that has a URL but no weight is asked
    only in evaluations; at its first failure, here or later, it is dropped with a warning.
    """

    def __init__(self, cfg: RewardConfig, *, caching: bool = True, offer_unneeded: bool = True):
        self.cfg = cfg
        self.scoring = ScoringConfig(
            batch_size=cfg.batch_size,
            overlong="truncate" if cfg.overlong == "truncate" else "error",
            max_input_length=cfg.max_input_length,
            cache=caching,
        )
        needed = {"metricx": cfg.needs_metricx, "xcomet": cfg.needs_xcomet}
        self.needed = tuple(name for name in SERVICES if needed[name])
        self.infos: dict[str, Info] = {}
        self._scorers: dict[ServiceName, Scorer] = {}
        self._told_truncated: set[ServiceName] = set()
        try:
            for name in SERVICES:
                if name in self.needed or offer_unneeded:
                    self._open(name)
        except BaseException:
            self.close()
            raise

    @property
    def available(self) -> tuple[ServiceName, ...]:
        """Services that can be asked: the needed ones, and those with a URL that answer."""
        return tuple(self._scorers)

    def close(self) -> None:
        """Close the connections."""
        for name in self.available:
            self._drop(name)

    def _drop(self, name: ServiceName) -> None:
        scorer = self._scorers.pop(name)
        if isinstance(scorer, RemoteScorer):
            scorer.close()

    def score(
        self, texts: Sequence[tuple[str, str]], services: Sequence[ServiceName] | None = None
    ) -> Scores:
        """Ask `services` (default: the needed ones) at once for (source, translation) pairs.

        Requests never carry a reference. Raises RewardFailure where `on_failure` is `fail`, and
        RequestError where a service refuses for good (a wrong key, a wrong option).
        """
        samples = [SampleForScoring(src, mt) for src, mt in texts]
        asked = self.needed if services is None else tuple(services)
        pending = {name: _in_thread(partial(self._ask, name, samples)) for name in asked}
        scores = Scores({name: future.result() for name, future in pending.items()})
        for name, results in scores.results.items():
            self._tell_truncated(name, results)
            if self.cfg.on_failure == "fail" and name in self.needed:
                for result in results:
                    if isinstance(result, Failed) and result.error.type not in TEXT_ERROR_TYPES:
                        raise RewardFailure(f"{name}: {result.error.type}: {result.error.message}")
        return scores

    def submit(self, texts: Sequence[tuple[str, str]]) -> Future[Scores]:
        """`score` of the needed services, in the background: a group is scored while others are
        still generated."""
        return _in_thread(partial(self.score, texts))

    def _open(self, name: ServiceName) -> None:
        urls: list[str] = getattr(self.cfg, f"{name}_urls") or _from_environment(name)
        needed = name in self.needed
        if not urls:
            if needed:
                raise UserError(
                    f"reward.{name}_urls is empty: name the URL of a running {name} service there "
                    f"or in {name.upper()}_URL, or set the weight of its reward to 0"
                )
            return
        try:
            self._scorers[name] = self._connect(name, urls)
        except Exception as error:  # of a service that is only shown, none may end the run
            if needed:
                raise
            log.warning("evaluations go without %s: %s", name, error)

    def _connect(self, name: ServiceName, urls: list[str]) -> Scorer:
        local = [url for url in urls if not url.startswith(("http://", "https://"))]
        if local:
            if len(urls) > 1:
                raise UserError(f"reward.{name}_urls: {local[0]!r} cannot stand beside another")
            return self._in_process(name, local[0])
        infos = {url: self._check(name, url) for url in urls}
        _check_agreement(name, infos)
        self.infos |= infos
        return self._remote(name, urls)

    def _remote(self, name: ServiceName, urls: list[str]) -> RemoteScorer:
        most = self.cfg.deadline_s if name in self.needed else _SHOWN_DEADLINE_S
        return RemoteScorer(
            urls,
            timeout_s=min(self.cfg.timeout_s, most),
            deadline_s=min(self.cfg.deadline_s, most),
        )

    def _in_process(self, name: ServiceName, target: str) -> Scorer:
        """A `module:Class`, held against the config's expectations if it describes itself."""
        module, colon, class_name = target.partition(":")
        names = [*module.split("."), class_name]
        if not colon or not all(part.isidentifier() for part in names):
            raise UserError(
                f"reward.{name}_urls: {target!r}: a URL begins with http://, and a scorer in this "
                "process is written module:Class"
            )
        scorer = resolve_scorer(target, **getattr(self.cfg, f"{name}_scorer_args"))
        description = getattr(scorer, "description", None)
        faults = []
        if description is not None:
            faults = self._mismatches(name, description)
        else:
            keys = [key for key in ("model_name", "tokenizer_name") if self._expected(name, key)]
            faults = [f"does not say what it runs: set reward.{name}_{key} to null" for key in keys]
        if faults:
            raise UserError(f"reward.{name}_urls: {target} {'; '.join(faults)}")
        return scorer

    def _check(self, name: ServiceName, url: str) -> Info:
        """`/v1/info` of one URL, held against the config's expectations."""
        try:
            with self._remote(name, [url]) as probe:
                info = probe.info()
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"reward.{name}_urls: {error}") from None
        if info.service != name:
            raise UserError(f"reward.{name}_urls: {url} is a {info.service} service")
        faults = self._mismatches(name, info)
        if faults:
            raise UserError(f"reward.{name}_urls: {url} {'; '.join(faults)}")
        return info

    def _expected(self, name: ServiceName, key: str) -> str | None:
        return getattr(self.cfg, f"{name}_{key}", None)

    def _mismatches(self, name: ServiceName, described: Any) -> list[str]:
        """What an Info, or a scorer's description with such fields, says against the config."""
        faults = []
        if described.higher_is_better != HIGHER_IS_BETTER[name]:
            faults.append(f"says higher_is_better={described.higher_is_better}")
        for key, field_name in (("model_name", "model"), ("tokenizer_name", "tokenizer")):
            expected, actual = self._expected(name, key), getattr(described, field_name)
            if expected is not None and expected != actual:
                faults.append(f"runs {actual!r}, but reward.{name}_{key} is {expected!r}")
        limit = self.cfg.max_input_length
        if limit is not None and limit > described.max_input_length:
            faults.append(
                f"reads {described.max_input_length} tokens, but reward.max_input_length is {limit}"
            )
        return faults

    def _ask(self, name: ServiceName, samples: Sequence[SampleForScoring]) -> list[Scored | Failed]:
        """Results of one service; one that cannot be reached in time fails every sample, one that
        is only shown does so on any error, and is not asked again."""
        try:
            output: RewardOutput = self._scorers[name].score_batch(samples, self.scoring)
            count = len(output.metadata)
            if count != len(samples):
                raise ScorekitError(f"{name}: {count} results, {len(samples)} samples")
            return output.metadata
        except Exception as error:
            if name not in self.needed:
                log.warning("evaluations go without %s from now on: %s", name, error)
                self._drop(name)
            elif isinstance(error, ServiceUnreachable | RequestError) and (
                not isinstance(error, RequestError) or error.retryable
            ):
                log.warning("%s: no scores for %d samples: %s", name, len(samples), error)
            else:
                raise
            fault = WireError(type="upstream", message=str(error), retryable=True)
            return [Failed(id=None, ok=False, error=fault) for _ in samples]

    def _tell_truncated(self, name: ServiceName, results: Sequence[Scored | Failed]) -> None:
        """Warn once where a model does not read much of what it scores."""
        flags = [_is_truncated(result) for result in results if isinstance(result, Scored)]
        if name not in self._told_truncated and sum(flags) > _TRUNCATED_TOLD * len(flags):
            self._told_truncated.add(name)
            log.warning(
                "%s could not read %d of %d samples to their end; their scores are of the part "
                "that it read", name, sum(flags), len(flags),
            )  # fmt: skip


def _check_agreement(name: ServiceName, infos: dict[str, Info]) -> None:
    """Raise UserError where two URLs of one service would not give the same scores."""
    (first, one), *others = infos.items()
    for url, other in others:
        for key in ("model", "revision", "dtype", "tokenizer"):
            if getattr(one, key) != getattr(other, key):
                raise UserError(
                    f"reward.{name}_urls: {first} has {key} {getattr(one, key)!r}, {url} has "
                    f"{getattr(other, key)!r}: scores of one run must be of one model"
                )


def sample_rewards(
    rollouts: Sequence[Rollout], scores: Scores, cfg: RewardConfig
) -> list[SampleReward]:
    """Raw answers -> rewards.

    r_seq = w_metricx (metricx_offset - metricx_score) + w_xcomet_seq xcomet_seq_scale xcomet_score
            - sum over guards w_guard fault - no_eos_penalty if cut by max_new_tokens,
    or `text_error_reward` where the text is at fault, or None where a service failed.
    """
    return [
        _sample_reward(rollout, {name: scores.results[name][i] for name in scores.results}, cfg)
        for i, rollout in enumerate(rollouts)
    ]


def _sample_reward(
    rollout: Rollout, results: dict[ServiceName, Scored | Failed], cfg: RewardConfig
) -> SampleReward:
    tokens = len(rollout.completion_token_ids)
    reward = SampleReward(0.0, [0.0] * tokens, [True] * tokens, asked=tuple(results))
    for name, result in results.items():
        if isinstance(result, Scored):
            setattr(reward, f"{name}_score", result.score)
            setattr(reward, f"{name}_truncated", _is_truncated(result))
            if name == "xcomet":
                reward.error_spans = result.error_spans
        elif result.error.type in TEXT_ERROR_TYPES:
            reward.text_error = f"{name}: {result.error.type}"
        else:
            reward.service_error = f"{name}: {result.error.type}: {result.error.message}"
    src_lang, _, tgt_lang = rollout.pair.partition(">")
    reward.guards = guard_faults(
        rollout.src_text, rollout.completion_text, src_lang, tgt_lang, cfg.guards
    )
    no_eos = cfg.no_eos_penalty if rollout.finish_reason == "length" else 0.0
    if reward.text_error is not None:
        reward.r_seq = cfg.text_error_reward - no_eos
        return reward
    if reward.service_error is not None:
        reward.r_seq = None
        return reward
    reward.r_seq = -no_eos - guard_penalty(reward.guards, cfg.guards)
    if reward.metricx_score is not None:
        reward.r_seq += cfg.w_metricx * metricx_reward(reward.metricx_score, cfg.metricx_offset)
    if reward.xcomet_score is not None:
        reward.r_seq += cfg.w_xcomet_seq * cfg.xcomet_seq_scale * reward.xcomet_score
    if cfg.needs_spans:
        _add_span_term(reward, rollout, results["xcomet"], cfg)
    return reward


def _add_span_term(
    reward: SampleReward, rollout: Rollout, result: Scored | Failed, cfg: RewardConfig
) -> None:
    if not isinstance(result, Scored) or result.error_spans is None:
        raise ScorekitError("the xCOMET scorer gives no error spans; set reward.w_xcomet_span to 0")
    penalties = spans_to_token_rewards(
        rollout.completion_text,
        rollout.token_char_offsets,
        result.error_spans,
        cfg.severity_weights.model_dump(),
        cfg.overlap_policy,
        overlap_threshold=cfg.overlap_threshold,
        combine=cfg.span_combine,
        use_confidence=cfg.use_confidence,
    )
    reward.token_rewards = [cfg.w_xcomet_span * penalty for penalty in penalties]
    reward.valid = covered_tokens(
        rollout.completion_text, rollout.token_char_offsets, result.mt_covered
    )


def _is_truncated(result: Scored) -> bool:
    return result.truncated.src or result.truncated.mt


def metricx_reward(score: float, offset: float = 5.0) -> float:
    """offset - score: the reward of TranslateGemma (arXiv 2601.09012, section 4)."""
    return offset - score


def _from_environment(name: ServiceName) -> list[str]:
    value = os.environ.get(f"{name.upper()}_URL", "")
    return [url.strip() for url in value.split(",") if url.strip()]


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread: unlike a pool's, it does not hold up a Ctrl-C."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
