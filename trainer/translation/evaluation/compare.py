"""Two translators on the same sources: paired differences with bootstrap intervals
(trainer/runs/verbs/paired.py), of all sources and by language pair.

Corpus chrF and BLEU are computed anew for each draw, from the sums of the segments' statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from trainer.runs.verbs.paired import (
    RESAMPLES,
    SEED,
    Line,
    PairedFigure,
    compare_lines,
    paired_figure,
)
from trainer.translation.evaluation.figures import CHRF, metrics_of, ranking, table
from trainer.translation.evaluation.quality import corpus_metrics


def compare_policies(
    first: Sequence[Line], second: Sequence[Line], resamples: int = RESAMPLES, seed: int = SEED
) -> dict[str, list[PairedFigure]]:
    """Figures of all sources under "all", and of each language pair where there are several.

    first, second: the lines of two evaluation dumps (trainer/translation/dumps.py), of the same
    sources in the same order. Raises ValueError where they are not.
    """
    sources = [[(line.get("pair"), line["src"]) for line in lines] for lines in (first, second)]
    if sources[0] != sources[1]:
        raise ValueError("the two evaluations are not of the same sources in the same order")
    groups = {"all": list(range(len(first)))}
    pairs = dict.fromkeys(line.get("pair", "") for line in first)
    if len(pairs) > 1:
        for pair in pairs:
            groups[pair] = [i for i, line in enumerate(first) if line.get("pair", "") == pair]
    return {
        name: _compare([first[i] for i in chosen], [second[i] for i in chosen], resamples, seed)
        for name, chosen in groups.items()
    }


def _compare(
    first: Sequence[Line], second: Sequence[Line], resamples: int, seed: int
) -> list[PairedFigure]:
    figures = compare_lines(
        table(metrics_of(first), metrics_of(second)), first, second, resamples, seed
    )
    both_lines = [(a, b) for a, b in zip(first, second, strict=True) if a.get("ref")]
    if not both_lines:
        return figures
    references = [[a["ref"] for a, _ in both_lines]]
    for name, metric in corpus_metrics([a.get("pair", "") for a, _ in both_lines]).items():
        # The statistics of its segments, as sacrebleu.significance takes them.
        of_each = [
            metric._extract_corpus_statistics([lines[k]["mt"] for lines in both_lines], references)
            for k in (0, 1)
        ]
        stats = np.array(of_each, dtype=np.float64).transpose(1, 0, 2)
        score = partial(_corpus_score, metric=metric)
        title = {"chrf": "chrF", "bleu": "BLEU"}[name]
        left_out = len(first) - len(both_lines)
        figures.append(paired_figure(title, name, stats, left_out, score, True, resamples, seed))
    return figures


def _corpus_score(sums: Any, metric: Any) -> float:
    return float(metric._compute_score_from_stats([int(value) for value in sums]).score)


def changed_most(
    first: Sequence[Line], second: Sequence[Line], shown: int
) -> list[tuple[str, list[tuple[Line, Line]]]]:
    """(title, pairs of lines): whose score the second policy improved most, and worsened most.

    By the first of `ranking` that scored both (MetricX, xCOMET), else by chrF of the segment.
    """
    both = list(zip(first, second, strict=True))
    for judge in (*ranking(), CHRF):
        changes = [
            (judge.sign * (later - earlier), a, b)
            for a, b in both
            if (earlier := judge.of(a)) is not None and (later := judge.of(b)) is not None
        ]
        if changes:
            return _changed_by(judge.who, changes, shown)
    return []


def _changed_by(
    name: str, changes: list[tuple[float, Line, Line]], shown: int
) -> list[tuple[str, list[tuple[Line, Line]]]]:
    changes.sort(key=lambda change: change[0])
    chosen = (
        (f"Improved most, says {name}", [(a, b) for c, a, b in changes[::-1][:shown] if c > 0]),
        (f"Worsened most, says {name}", [(a, b) for c, a, b in changes[:shown] if c < 0]),
    )
    return [(title, pairs) for title, pairs in chosen if pairs]
