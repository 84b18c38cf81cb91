"""Compare translations: with references by chrF and BLEU, and two policies on the same sources.

chrF and BLEU are as sacrebleu computes them. Two policies are compared in total and by language
pair; corpus chrF and BLEU are then recomputed for each resample, from the sums of the segments'
statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from scorekit.languages import find_language
from scorekit.paired import (
    PairedStat,
    indices_by_group,
    largest_changes,
    paired_stat,
)
from trainer.runs.stats import compare_lines
from trainer.translation.evaluation.stats import CHRF, metrics_of, ranking, table

Line = Mapping[str, Any]
#: Languages whose words are not separated by white space and punctuation (and Korean, whose words
#: include particles).
_BY_CHARACTER = frozenset({"zh", "ja", "ko", "th"})


def bleu_tokenize(pair: str) -> str:
    """Return sacrebleu's tokenization for the target of a pair ("en-US>ko-KR"): `char`, else
    `13a`."""
    language = find_language(pair.rpartition(">")[2])
    return "char" if language is not None and language.madlad in _BY_CHARACTER else "13a"


def corpus_metrics(pairs: Sequence[str]) -> dict[str, Any]:
    """Return sacrebleu's metrics for texts of these pairs: `chrf`, and `bleu` if all have one pair.

    BLEU counts the words of one language, and no tokenization fits two: with several pairs it is
    computed for each, never for all together. chrF counts characters, and is computed for both.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    metrics: dict[str, Any] = {"chrf": CHRF()}
    if len(set(pairs)) == 1:
        metrics["bleu"] = BLEU(tokenize=bleu_tokenize(pairs[0]))
    return metrics


def reference_stats(
    pairs: Sequence[str], translations: Sequence[str], references: Sequence[str | None]
) -> dict[str, Any]:
    """Return `chrf`, `bleu` (0..100) and `bleu_tokenize` over translations with a reference.

    They are None without references; BLEU also with several language pairs (see `corpus_metrics`).
    """
    rows = [
        row for row in zip(pairs, translations, references, strict=True) if row[2]
    ]  # (pair, translation, reference)
    stats: dict[str, Any] = {"chrf": None, "bleu": None, "bleu_tokenize": None}
    if not rows:
        return stats
    row_pairs, outputs, row_references = (list(column) for column in zip(*rows, strict=True))
    metrics = corpus_metrics(row_pairs)
    stats |= {name: m.corpus_score(outputs, [row_references]).score for name, m in metrics.items()}
    if "bleu" in metrics:
        stats["bleu_tokenize"] = bleu_tokenize(row_pairs[0])
    return stats


def compare_policies(first: Sequence[Line], second: Sequence[Line]) -> dict[str, list[PairedStat]]:
    """Return the stats of all sources under "all", and of each language pair if there are several.

    first, second: the lines of two evaluation dumps (trainer/translation/dumps.py), of the same
    sources in the same order. Raises ValueError if they are not.
    """
    sources = [[(line.get("pair"), line["src"]) for line in lines] for lines in (first, second)]
    if sources[0] != sources[1]:
        raise ValueError("the two evaluations are not of the same sources in the same order")
    pairs = indices_by_group([line.get("pair", "") for line in first])
    groups = {"all": list(range(len(first)))} | pairs
    return {
        name: _compare([first[i] for i in chosen], [second[i] for i in chosen])
        for name, chosen in groups.items()
    }


def _compare(first: Sequence[Line], second: Sequence[Line]) -> list[PairedStat]:
    paired_stats = compare_lines(table(metrics_of(first), metrics_of(second)), first, second)
    both_lines = [(a, b) for a, b in zip(first, second, strict=True) if a.get("ref")]
    if not both_lines:
        return paired_stats
    references = [[a["ref"] for a, _ in both_lines]]
    for name, metric in corpus_metrics([a.get("pair", "") for a, _ in both_lines]).items():
        # The statistics of its segments, as in sacrebleu.significance.
        segment_stats = [
            metric._extract_corpus_statistics([lines[k]["mt"] for lines in both_lines], references)
            for k in (0, 1)
        ]
        stats = np.array(segment_stats, dtype=np.float64).transpose(1, 0, 2)
        score = partial(_corpus_score, metric=metric)
        title = {"chrf": "chrF", "bleu": "BLEU"}[name]
        left_out = len(first) - len(both_lines)
        paired_stats.append(paired_stat(title, name, stats, left_out, score, True))
    return paired_stats


def _corpus_score(sums: Any, metric: Any) -> float:
    return float(metric._compute_score_from_stats([int(value) for value in sums]).score)


def changed_most(
    first: Sequence[Line], second: Sequence[Line], limit: int
) -> list[tuple[str, list[tuple[Line, Line]]]]:
    """Return (title, pairs of lines) of sources whose score improved or worsened most.

    The score is that of the first of `ranking` that scored both (MetricX, xCOMET), else chrF of the
    segment.
    """
    pairs = list(zip(first, second, strict=True))
    for judge in (*ranking(), CHRF):
        changed = largest_changes(pairs, judge.value_of, f" by {judge.label}", limit, judge.sign)
        if changed is not None:
            return changed
    return []
