"""The client of every scoring service for code that is not async: scripts, notebooks, data frames.

with SyncScoringClient("http://127.0.0.1:8001") as client:
    results = client.score([{"src": "Hello.", "mt": "안녕하세요."}], progress=True)

`RemoteScorer` is that client behind the scorer protocol, and `resolve_scorer` finds a scorer by
name: a service behind a URL, or a class in this process.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.deduplication import Sample
from scorekit.client.tables import (
    as_sample_list,
    dataset_with_results,
    frame_with_results,
    samples_of_dataset,
    samples_of_frame,
    score_rows,
)
from scorekit.errors import UserError
from scorekit.net.loops import ForkSafeClient
from scorekit.net.retry import INTERACTIVE_S
from scorekit.report.progress import progress_bar
from scorekit.schemas import Info, Result
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

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame


class SyncScoringClient(ForkSafeClient[ScoringClient]):
    """ScoringClient for code that is not async. The arguments are the same.

    first_answer_s: None: 10 s for a call with `progress`, too, because somebody watches it.
    A forked child creates its own connections, thread and cache.
    """

    def __init__(
        self, urls: str | Iterable[str], *, first_answer_s: float | None = None, **kwargs: Any
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        self._watched_s = INTERACTIVE_S if first_answer_s is None else first_answer_s
        kwargs["first_answer_s"] = first_answer_s
        super().__init__("client", lambda: ScoringClient(urls, **kwargs), ScoringClient.close)

    def info(self) -> Info:
        """See ScoringClient.info."""
        return self.run(lambda client: client.info())

    def limits(self) -> Info:
        """See ScoringClient.limits."""
        return self.run(lambda client: client.limits())

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """See ScoringClient.wait_ready."""
        self.run(lambda client: client.wait_ready(timeout_s))

    def score(
        self, samples: Iterable[Sample], *args: Any, progress: bool = False, **kwargs: Any
    ) -> list[Result]:
        """See ScoringClient.score.

        progress: show a bar with rate and remaining time.
        """
        samples = as_sample_list(samples)
        if not progress:
            return self.run(lambda client: client.score(samples, *args, **kwargs))

        async def score(client: ScoringClient) -> list[Result]:
            if samples:
                await client.limits(first_answer_s=self._watched_s)
            return await client.score(samples, *args, **kwargs)

        with progress_bar(len(samples)) as advance:
            kwargs["on_progress"] = advance
            return self.run(score)

    def score_frame(
        self, frame: DataFrame, *, task: str | None = None, prefix: str = "", **kwargs: Any
    ) -> DataFrame:
        """Return a copy of a pandas data frame with the results as columns.

        Columns: `score` (NaN if the row failed), `ok`, `error` (None if it did not fail) and, if a
        result has them, `error_spans`, `omissions`, `unplaced` and `windows`.
        prefix: put in front of these names.

        The frame has text columns `src` and `mt`, and may have `ref` (NaN, None or "": no
        reference). Other columns stay as they are. A row without a text (None, a number) fails with
        `invalid_input`; the others are scored.
        task: of a judge (mqm), which also needs the columns `src_lang` and `tgt_lang`. `kwargs` as
        for `score`.

        Raises UserError before any request: if a column is missing, if a column of results exists
        already, or if no row has its texts.
        """
        rows = samples_of_frame(frame, task, prefix)
        results = score_rows(rows, lambda samples: self.score(samples, **kwargs))
        return frame_with_results(frame, results, prefix)

    def score_dataset(
        self, dataset: Dataset, *, task: str | None = None, prefix: str = "", **kwargs: Any
    ) -> Dataset:
        """Return a datasets.Dataset with the results as columns, as `score_frame` does for a frame.

        A score that is missing is None."""
        rows = samples_of_dataset(dataset, task, prefix)
        results = score_rows(rows, lambda samples: self.score(samples, **kwargs))
        return dataset_with_results(dataset, results, prefix)


class RemoteScorer(SyncScoringClient):
    """A scoring service behind the scorer protocol of scorekit/scorers.py."""

    def score_batch(
        self,
        samples: Iterable[ScorerSample],
        cfg: ScoringConfig | Mapping[str, Any] | None = None,
    ) -> RewardOutput:
        """Score in order; a failed sample has None as its score.

        samples: `SampleForScoring`, or dicts with its fields.
        cfg: also as a dict.

        Raises UserError for a sample or an option that is wrong.
        """
        chosen, options = as_samples(samples), as_scoring_config(cfg)
        return self.run(lambda client: _scored(client, chosen, options))

    def submit_batch(
        self,
        samples: Iterable[ScorerSample],
        cfg: ScoringConfig | Mapping[str, Any] | None = None,
    ) -> Future[RewardOutput]:
        """Start `score_batch` without waiting. Cancel the future to end its requests."""
        chosen, options = as_samples(samples), as_scoring_config(cfg)
        return self.submit(lambda client: _scored(client, chosen, options))


async def _scored(
    client: ScoringClient, samples: Sequence[SampleForScoring], cfg: ScoringConfig
) -> RewardOutput:
    options = cfg.options()
    if samples and (await client.limits()).service == "judge":
        options = _judge_options(cfg)
    return reward_output(await client.score(samples, options, batch_size=cfg.batch_size))


def _judge_options(cfg: ScoringConfig) -> dict[str, Any]:
    """Return a judge's options. A judge never cuts: a text that is too long fails.

    Raises UserError for options that only other scorers have."""
    if cfg.overlong == "windows" or cfg.max_input_length is not None:
        raise UserError(
            "a judge reads whole texts: leave out overlong: windows and max_input_length"
        )
    return {"cache": cfg.cache}


def resolve_scorer(target: str, **kwargs: Any) -> Scorer:
    """Return a scorer by URL (`http://...`: the service there) or by `module:Class`.

    This is the only bridge between the trainer and a model in its own process: the name is resolved
    at run time, so that no package imports another's.
    Raises UserError if it cannot be loaded, is not a scorer, or does not take these arguments.
    """
    if target.startswith(("http://", "https://")):
        return RemoteScorer(target, **kwargs)
    scorer_type = scorer_class(target)
    try:
        inspect.signature(scorer_type).bind(**kwargs)
    except TypeError as error:
        parameter_names = ", ".join(inspect.signature(scorer_type).parameters) or "none"
        raise UserError(f"scorer {target!r}: {error}; its arguments: {parameter_names}") from None
    scorer = scorer_type(**kwargs)
    if not isinstance(scorer, Scorer):
        raise UserError(f"scorer {target!r} is no scorer: it has no score_batch(samples, cfg)")
    return scorer


def scorer_class(target: str) -> Callable[..., Any]:
    """Return the class that `module:Class` names. Raises UserError."""
    module_name, colon, class_name = target.partition(":")
    if not colon:
        raise UserError(f"scorer {target!r}: give a URL or module:Class")
    try:
        scorer_type = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"scorer {target!r} cannot be loaded: {error}") from None
    if not callable(scorer_type):
        raise UserError(f"scorer {target!r} is no class")
    return scorer_type
