"""chrF and BLEU against references, as sacrebleu computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scorekit.languages import find_language

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
