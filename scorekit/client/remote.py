"""Scorers by name: a service behind a URL, or a class in this process."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.sync import SyncScoringClient
from scorekit.errors import UserError
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


class RemoteScorer(SyncScoringClient):
    """A scoring service behind the scorer protocol of scorekit/scorers.py."""

    def score_batch(
        self,
        samples: Iterable[ScorerSample],
        cfg: ScoringConfig | Mapping[str, Any] | None = None,
    ) -> RewardOutput:
        """Score in order; a failed sample has None as its score.

        samples: `SampleForScoring`, or dicts with its fields. cfg: also as a dict.
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
