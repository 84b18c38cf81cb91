"""Metrics that are shown in evaluations and are no part of a reward (`eval.metrics`).

What a policy is trained on it also learns to please; a metric that it was not trained on tells
whether the translations became better, or only the reward. So none may run the model of a reward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from scorekit.client import RemoteScorer
from scorekit.client.endpoints import check_agreement
from scorekit.errors import ScorekitError, UserError
from scorekit.schemas import Info
from scorekit.scorers import SampleForScoring, ScoringConfig
from trainer.runs.config import set_key
from trainer.runs.figures import mean_of
from trainer.translation.data import Example
from trainer.translation.rewards.services import Rewarder

log = logging.getLogger(__name__)
#: Seconds in which a metric says that it is there; it may be down, and no run waits for it long.
_PROBE_S = 10.0
#: Samples that are put to a metric at once: what is lost where that fails.
_PIECE = 64
#: Characters of a revision that is a digest of files or a commit: two models never share one.
_DIGEST = 32


@dataclass(frozen=True, slots=True)
class MetricModel:
    """What a metric says of itself. better: "higher" or "lower". model: its id and revision."""

    better: str
    model: str


#: Of each metric: a score for each sample (None: it has none), and what it told (None: it is down).
Scores = Mapping[str, tuple[list[float | None], MetricModel | None]]


class HeldOutMetrics:
    """The metrics of `eval.metrics`: name -> URLs. One that does not answer is left out of an
    evaluation, with a warning, and asked again in the next."""

    def __init__(self, urls: Mapping[str, list[str]], rewarder: Rewarder) -> None:
        self._urls, self._rewarder = urls, rewarder
        cfg = rewarder.cfg
        self._timeout_s = cfg.timeout_s
        #: Id and revision of those that have answered, by their keys in the config.
        self.models: dict[str, str] = {}
        self._scoring = ScoringConfig(batch_size=cfg.batch_size, cache=rewarder.scoring.cache)

    def check(self, sets: Mapping[str, Sequence[Example]]) -> list[str]:
        """What each is; warns of those that are down. Raises UserError where one is a reward's, or
        needs references that a set does not have."""
        said = []
        for name, urls in self._urls.items():
            info = self._info(name, at_start=True)
            if info is None:
                said.append(f"{name}: {urls[0]} does not answer; its figures will be missing")
                continue
            for of_set, examples in sets.items():
                self._check_references(name, info, of_set, examples)
            better = "higher" if info.higher_is_better else "lower"
            said.append(f"{name}: {info.model}, {better} is better")
        return said

    def score(self, texts: Sequence[tuple[str, str, str | None]]) -> Scores:
        """(source, translation, reference) of each sample -> scores by metric."""
        return {name: self._score(name, texts) for name in self._urls}

    def _score(
        self, name: str, texts: Sequence[tuple[str, str, str | None]]
    ) -> tuple[list[float | None], MetricModel | None]:
        info = self._info(name)
        if info is None:
            return [None] * len(texts), None
        # Of a service that does not say, it is not known what a reference would do.
        reads = (info.inputs or {}).get("ref", "ignored") != "ignored"
        samples = [SampleForScoring(src, mt, ref if reads else None) for src, mt, ref in texts]
        scores: list[float | None] = []
        try:
            with closing(_open(self._urls[name], self._timeout_s)) as scorer:
                for at in range(0, len(samples), _PIECE):
                    piece = samples[at : at + _PIECE]
                    scores += scorer.score_batch(piece, self._scoring).sequence_scores
        except ScorekitError as error:
            log.warning("eval.metrics.%s: %s", name, error)
        scores += [None] * (len(texts) - len(scores))
        better = "higher" if info.higher_is_better else "lower"
        return scores, MetricModel(better, f"{info.model}@{info.revision}")

    def _info(self, name: str, *, at_start: bool = False) -> Info | None:
        """What it says of itself; None where it does not answer. Raises UserError where it may not
        be asked; at the start also where what is behind a URL is no metric that can be asked."""
        key, infos = f"eval.metrics.{name}", dict[str, Info]()
        mine = {url.rstrip("/") for url in self._urls[name]}
        if same := mine & self._rewarder.needed_urls:
            raise UserError(f"{key}: {min(same)} is a reward's: a held-out metric must not be one")
        for url in self._urls[name]:
            try:
                with closing(_open([url], min(_PROBE_S, self._timeout_s))) as scorer:
                    infos[url] = scorer.info()
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
            raise UserError(f"{key}: a judge scores no translations; name another service")
        for model, revision in self._rewarder.needed_models:
            # A copy of a folder has another name, and the same digest.
            named_alike = model == info.model or len(info.revision) >= _DIGEST
            if revision == info.revision and named_alike:
                raise UserError(
                    f"{key}: it runs {info.model} ({info.revision[:12]}), which is a reward's "
                    "model: a held-out metric must be another"
                )

    def _check_references(
        self, name: str, info: Info, of_set: str, examples: Sequence[Example]
    ) -> None:
        without = [k for k, example in enumerate(examples, 1) if not example.ref_text]
        if without and (info.inputs or {}).get("ref") == "required":
            raise UserError(
                f"eval.metrics.{name}: {info.model} needs references, and {len(without)} of "
                f"{len(examples)} rows of {set_key(of_set)} have none (the first is row "
                f"{without[0]}): leave that metric out, or give them references"
            )


def _open(urls: Sequence[str], most: float) -> RemoteScorer:
    return RemoteScorer(urls, timeout_s=most, deadline_s=most)


def metric_figures(scores: Scores, places: Iterable[int]) -> dict[str, Any]:
    """Of some samples by their places: `metric_NAME_mean`, `metric_NAME_coverage`, and, where it is
    known, `metric_NAME_better` and `metric_NAME_model`."""
    chosen, figures = list(places), dict[str, Any]()
    for name, (values, told) in scores.items():
        scored = [value for k in chosen if (value := values[k]) is not None]
        figures[f"metric_{name}_mean"] = mean_of(scored)
        figures[f"metric_{name}_coverage"] = len(scored) / max(1, len(chosen))
        figures[f"metric_{name}_better"] = told.better if told else None
        figures[f"metric_{name}_model"] = told.model if told else None
    return figures


def line_metrics(scores: Scores, place: int) -> dict[str, Any]:
    """`metrics` of a line of the dump: of each its score and which direction is better; nothing
    where there are no metrics."""
    found = {
        name: {"score": values[place], "better": told.better if told else None}
        for name, (values, told) in scores.items()
    }
    return {"metrics": found} if found else {}


def whole_scores(
    scores: Scores, places: Sequence[int], gather: Callable[[list[Any]], list[Any]]
) -> Scores:
    """Those of all samples, where each process has those at its `places`."""
    parts = gather([(list(places), dict(scores))])
    count = sum(len(of_part) for of_part, _ in parts)
    whole: dict[str, tuple[list[float | None], MetricModel | None]] = {}
    for name in scores:
        values: list[float | None] = [None] * count
        for of_part, part in parts:
            for place, value in zip(of_part, part[name][0], strict=True):
                values[place] = value
        whole[name] = values, next((p[name][1] for _, p in parts if p[name][1]), None)
    return whole
