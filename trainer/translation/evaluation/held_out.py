"""Metrics for evaluations that are no part of a reward (`eval.metrics`).

A policy may learn to exploit its reward. A metric that it was not trained on shows whether the
translations improve, or only the reward. So none may run the model of a reward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from scorekit.client import RemoteScorer
from scorekit.client.replicas import check_agreement
from scorekit.errors import ScorekitError, UserError
from scorekit.net.addresses import address_of
from scorekit.schemas import Info
from scorekit.scorers import SampleForScoring, ScoringConfig
from trainer.runs.config import set_key
from trainer.runs.stats import mean_of
from trainer.translation.data import Example
from trainer.translation.rewards.services import RewardClient

log = logging.getLogger(__name__)
#: Timeout in seconds of a metric's /v1/info; it may be down, and no run waits long for it.
_PROBE_S = 10.0
#: Samples in one request to a metric, all of which are lost if it fails.
_BATCH = 64
#: Characters of a revision that is a digest of files or a commit: two models never share one.
_DIGEST = 32


@dataclass(frozen=True, slots=True)
class MetricModel:
    """A metric's description of itself.

    better: "higher" or "lower".
    model: its id and revision.
    """

    better: str
    model: str


#: By metric: a score for each sample (None without one), and its description (None: it is down).
Scores = Mapping[str, tuple[list[float | None], MetricModel | None]]


class HeldOutMetrics:
    """The metrics of `eval.metrics`: name -> URLs.

    One that does not answer is left out of an evaluation, with a warning, and tried again in the
    next.
    """

    def __init__(self, urls: Mapping[str, list[str]], rewarder: RewardClient) -> None:
        self._urls, self._rewarder = urls, rewarder
        cfg = rewarder.cfg
        self._timeout_s = cfg.timeout_s
        #: Id and revision of metrics that have answered, by their keys in the config.
        self.models: dict[str, str] = {}
        self._scoring = ScoringConfig(batch_size=cfg.batch_size, cache=rewarder.scoring.cache)

    def check(self, sets: Mapping[str, Sequence[Example]]) -> list[str]:
        """Return a description of each metric; log a warning for those that are down.

        Raises UserError if one is a reward's, or needs references that a set does not have.
        """
        descriptions = []
        for name, urls in self._urls.items():
            info = self._info(name, at_start=True)
            if info is None:
                descriptions.append(
                    f"{name}: {address_of(urls[0])} does not answer; its stats will be missing"
                )
                continue
            for set_name, examples in sets.items():
                self._check_references(name, info, set_name, examples)
            better = "higher" if info.higher_is_better else "lower"
            descriptions.append(f"{name}: {info.model}, {better} is better")
        return descriptions

    def score(self, texts: Sequence[tuple[str, str, str | None]]) -> Scores:
        """Return the scores by metric for (source, translation, reference) of each sample."""
        return {name: self._score(name, texts) for name in self._urls}

    def _score(
        self, name: str, texts: Sequence[tuple[str, str, str | None]]
    ) -> tuple[list[float | None], MetricModel | None]:
        info = self._info(name)
        if info is None:
            return [None] * len(texts), None
        # If a service does not describe its inputs, the effect of a reference is unknown.
        reads_reference = (info.inputs or {}).get("ref", "ignored") != "ignored"
        samples = [
            SampleForScoring(src, mt, ref if reads_reference else None) for src, mt, ref in texts
        ]
        scores: list[float | None] = []
        try:
            with closing(_open(self._urls[name], self._timeout_s)) as scorer:
                for start in range(0, len(samples), _BATCH):
                    batch = samples[start : start + _BATCH]
                    scores += scorer.score_batch(batch, self._scoring).sequence_scores
        except ScorekitError as error:
            log.warning("eval.metrics.%s: %s", name, error)
        scores += [None] * (len(texts) - len(scores))
        better = "higher" if info.higher_is_better else "lower"
        return scores, MetricModel(better, f"{info.model}@{info.revision}")

    def _info(self, name: str, *, at_start: bool = False) -> Info | None:
        """Return the metric's description; None if it does not answer.

        Raises UserError if the metric is not allowed; at the start also if a URL is no metric.
        """
        key, infos = f"eval.metrics.{name}", dict[str, Info]()
        own_urls = {address_of(url) for url in self._urls[name]}
        if shared_urls := own_urls & self._rewarder.needed_urls:
            raise UserError(
                f"{key}: {min(shared_urls)} is a reward's. A held-out metric must be another one"
            )
        for url in self._urls[name]:
            try:
                with closing(_open([url], min(_PROBE_S, self._timeout_s))) as scorer:
                    infos[address_of(url)] = scorer.info()
            except ScorekitError as error:
                if at_start and error.exit_code == 2:  # a wrong URL, key or service
                    raise UserError(f"{key}: {error}") from None
                log.warning("%s does not answer: %s", key, error)
        if not infos:
            return None
        check_agreement(key, infos)
        info = next(iter(infos.values()))
        self._check_model(key, info)
        self.models[key] = f"{info.model}@{info.revision}"
        return info

    def _check_model(self, key: str, info: Info) -> None:
        if info.service == "judge":
            raise UserError(f"{key}: a judge does not score translations. Name another service")
        for model, revision in self._rewarder.needed_models:
            # A copy of a folder has another name, but the same digest.
            is_same = model == info.model or len(info.revision) >= _DIGEST
            if revision == info.revision and is_same:
                raise UserError(
                    f"{key}: it runs {info.model} ({info.revision[:12]}), which is a reward's "
                    "model. A held-out metric must use another one"
                )

    def _check_references(
        self, name: str, info: Info, set_name: str, examples: Sequence[Example]
    ) -> None:
        without = [k for k, example in enumerate(examples, 1) if not example.ref_text]
        if without and (info.inputs or {}).get("ref") == "required":
            raise UserError(
                f"eval.metrics.{name}: {info.model} needs references, and {len(without)} of "
                f"{len(examples)} rows of {set_key(set_name)} have none (the first is row "
                f"{without[0]}). Remove that metric, or add references"
            )


def _open(urls: Sequence[str], timeout_s: float) -> RemoteScorer:
    return RemoteScorer(urls, timeout_s=timeout_s, deadline_s=timeout_s)


def metric_stats(scores: Scores, indices: Iterable[int]) -> dict[str, Any]:
    """Return the stats of samples with these indices.

    They are `metric_NAME_mean`, `metric_NAME_coverage`, and, if known, `metric_NAME_better` and
    `metric_NAME_model`.
    """
    chosen, stats = list(indices), dict[str, Any]()
    for name, (values, description) in scores.items():
        scored = [value for k in chosen if (value := values[k]) is not None]
        stats[f"metric_{name}_mean"] = mean_of(scored)
        stats[f"metric_{name}_coverage"] = len(scored) / max(1, len(chosen))
        stats[f"metric_{name}_better"] = description.better if description else None
        stats[f"metric_{name}_model"] = description.model if description else None
    return stats


def line_metrics(scores: Scores, index: int) -> dict[str, Any]:
    """Return `metrics` of a line of the dump: score and better direction of each; {} without
    metrics."""
    metrics = {
        name: {"score": values[index], "better": description.better if description else None}
        for name, (values, description) in scores.items()
    }
    return {"metrics": metrics} if metrics else {}


def whole_scores(
    scores: Scores, indices: Sequence[int], gather: Callable[[list[Any]], list[Any]]
) -> Scores:
    """Return the scores of all samples, from those that each process has at its `indices`."""
    parts = gather([(list(indices), dict(scores))])
    count = sum(len(part_indices) for part_indices, _ in parts)
    all_scores: dict[str, tuple[list[float | None], MetricModel | None]] = {}
    for name in scores:
        values: list[float | None] = [None] * count
        for part_indices, part_scores in parts:
            for index, value in zip(part_indices, part_scores[name][0], strict=True):
                values[index] = value
        all_scores[name] = values, next((p[name][1] for _, p in parts if p[name][1]), None)
    return all_scores
