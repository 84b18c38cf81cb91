"""Rewards of rollouts: asks both services at once, and keeps failures apart from scores."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from scorekit.client import RemoteScorer
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    RequestError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.schemas import ErrorSpan, Failed, Info, Scored
from scorekit.scorers import (
    RewardOutput,
    SampleForScoring,
    Scorer,
    ScoringConfig,
    resolve_scorer,
)
from trainer.config import RewardConfig
from trainer.credit import covered_tokens, spans_to_token_rewards
from trainer.sampler import Rollout

log = logging.getLogger(__name__)
T = TypeVar("T")
ServiceName = Literal["metricx", "xcomet"]
SERVICES: tuple[ServiceName, ...] = ("metricx", "xcomet")
#: Which direction of the score the reward's formula takes for granted.
HIGHER_IS_BETTER = {"metricx": False, "xcomet": True}


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
    text_error: why the text could not be scored by its own fault; service_error: why a service
    gave no score.
    """

    r_seq: float | None
    token_rewards: list[float]
    valid: list[bool]
    metricx_score: float | None = None
    xcomet_score: float | None = None
    error_spans: list[ErrorSpan] | None = None
    text_error: str | None = None
    service_error: str | None = None


@dataclass(slots=True)
class Scores:
    """Raw answers: results of each service that was asked, in the order of the samples."""

    results: dict[ServiceName, list[Scored | Failed]] = field(default_factory=dict)


class Rewarder:
    """The reward services of a run.

    Opening it checks that each service that is needed answers, runs the model that the config
    expects, and scores in the expected direction. A service that has a URL but no weight is asked
    only in evaluations, and left out with a warning if it does not answer.
    """

    def __init__(self, cfg: RewardConfig, *, caching: bool = True, offer_unneeded: bool = True):
        self.cfg = cfg
        self.scoring = ScoringConfig(
            batch_size=cfg.batch_size,
            overlong=cfg.overlong,
            max_input_length=cfg.max_input_length,
            cache=caching,
        )
        needed = {"metricx": cfg.needs_metricx, "xcomet": cfg.needs_xcomet}
        self.needed = tuple(name for name in SERVICES if needed[name])
        self.infos: dict[str, Info] = {}
        self._scorers: dict[ServiceName, Scorer] = {}
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
        for scorer in self._scorers.values():
            if isinstance(scorer, RemoteScorer):
                scorer.close()
        self._scorers = {}

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
        if self.cfg.on_failure == "fail":
            for name, results in scores.results.items():
                for result in results:
                    if isinstance(result, Failed) and result.error.type not in TEXT_ERROR_TYPES:
                        raise RewardFailure(f"{name}: {result.error.type}: {result.error.message}")
        return scores

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
        except UserError as error:
            if needed:
                raise
            log.warning("evaluations go without %s: %s", name, error)

    def _connect(self, name: ServiceName, urls: list[str]) -> Scorer:
        local = [url for url in urls if not url.startswith(("http://", "https://"))]
        if local:
            if len(urls) > 1:
                raise UserError(f"reward.{name}_urls: {local[0]!r} cannot stand beside another")
            return resolve_scorer(local[0], **getattr(self.cfg, f"{name}_scorer_args"))
        for url in urls:
            self.infos[url] = self._check(name, url)
        return RemoteScorer(urls, timeout_s=self.cfg.timeout_s, deadline_s=self.cfg.deadline_s)

    def _check(self, name: ServiceName, url: str) -> Info:
        """`/v1/info` of one URL, held against the config's expectations."""
        try:
            with RemoteScorer(url, timeout_s=self.cfg.timeout_s) as probe:
                info = probe.info()
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"reward.{name}_urls: {error}") from None
        faults = []
        if info.service != name:
            faults.append(f"is a {info.service} service")
        elif info.higher_is_better != HIGHER_IS_BETTER[name]:
            faults.append(f"says higher_is_better={info.higher_is_better}")
        for key, actual in (("model_name", info.model), ("tokenizer_name", info.tokenizer)):
            expected = getattr(self.cfg, f"{name}_{key}", None)
            if expected is not None and expected != actual:
                faults.append(f"runs {actual!r}, but reward.{name}_{key} is {expected!r}")
        if faults:
            raise UserError(f"reward.{name}_urls: {url} {'; '.join(faults)}")
        return info

    def _ask(self, name: ServiceName, samples: Sequence[SampleForScoring]) -> list[Scored | Failed]:
        """Results of one service; one that cannot be reached in time fails every sample."""
        try:
            output: RewardOutput = self._scorers[name].score_batch(samples, self.scoring)
        except (ServiceUnreachable, RequestError) as error:
            if isinstance(error, RequestError) and not error.retryable:
                raise
            log.warning("%s: no scores for %d samples: %s", name, len(samples), error)
            failed = {"type": "upstream", "message": str(error), "retryable": True}
            return [Failed(id=None, ok=False, error=failed) for _ in samples]  # type: ignore[arg-type]
        if len(output.metadata) != len(samples):
            raise ScorekitError(f"{name}: {len(output.metadata)} results, {len(samples)} samples")
        return output.metadata


def sample_rewards(
    rollouts: Sequence[Rollout], scores: Scores, cfg: RewardConfig
) -> list[SampleReward]:
    """Raw answers -> rewards.

    r_seq = w_metricx (metricx_offset - metricx_score) + w_xcomet_seq xcomet_seq_scale xcomet_score
            - no_eos_penalty if cut by max_new_tokens,
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
    reward = SampleReward(0.0, [0.0] * tokens, [True] * tokens)
    for name, result in results.items():
        if isinstance(result, Scored):
            setattr(reward, f"{name}_score", result.score)
            if name == "xcomet":
                reward.error_spans = result.error_spans
        elif result.error.type in TEXT_ERROR_TYPES:
            reward.text_error = f"{name}: {result.error.type}"
        else:
            reward.service_error = f"{name}: {result.error.type}: {result.error.message}"
    no_eos = cfg.no_eos_penalty if rollout.finish_reason == "length" else 0.0
    if reward.text_error is not None:
        reward.r_seq = cfg.text_error_reward - no_eos
        return reward
    if reward.service_error is not None:
        reward.r_seq = None
        return reward
    reward.r_seq = -no_eos
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
