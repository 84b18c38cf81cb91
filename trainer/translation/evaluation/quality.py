"""chrF and BLEU against references, as sacrebleu computes them: what evaluations show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scorekit.languages import find_language

#: Languages whose words white space and punctuation do not show (and Korean, where a word carries
#: its particles with it).
_BY_CHARACTER = frozenset({"zh", "ja", "ko", "th"})


def bleu_tokenize(pair: str) -> str:
    """sacrebleu's tokenisation for the target of a pair ("en-US>ko-KR"): `char`, else `13a`."""
    language = find_language(pair.rpartition(">")[2])
    return "char" if language is not None and language.madlad in _BY_CHARACTER else "13a"


def corpus_metrics(pairs: Sequence[str]) -> dict[str, Any]:
    """sacrebleu's metrics for texts of these language pairs: `chrf`, and `bleu` where all are of
    one pair.

    BLEU counts the words of one language, and no tokenisation fits two: of several pairs it is
    given for each, never for all together. chrF counts characters, and is given for both.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    metrics: dict[str, Any] = {"chrf": CHRF()}
    if len(set(pairs)) == 1:
        metrics["bleu"] = BLEU(tokenize=bleu_tokenize(pairs[0]))
    return metrics


def reference_figures(
    pairs: Sequence[str], translations: Sequence[str], references: Sequence[str | None]
) -> dict[str, Any]:
    """`chrf`, `bleu` (0..100) and `bleu_tokenize` over the translations that have a reference;
    None where there is none, BLEU also of several language pairs (see `corpus_metrics`)."""
    rows = [
        row for row in zip(pairs, translations, references, strict=True) if row[2]
    ]  # (pair, translation, reference)
    figures: dict[str, Any] = {"chrf": None, "bleu": None, "bleu_tokenize": None}
    if not rows:
        return figures
    of_pairs, outputs, true = (list(column) for column in zip(*rows, strict=True))
    metrics = corpus_metrics(of_pairs)
    figures |= {name: m.corpus_score(outputs, [true]).score for name, m in metrics.items()}
    if "bleu" in metrics:
        figures["bleu_tokenize"] = bleu_tokenize(of_pairs[0])
    return figures


def sentence_chrf(translation: str, reference: str | None) -> float | None:
    """chrF of one segment; None without a reference."""
    if not reference:
        return None
    import sacrebleu

    return float(sacrebleu.sentence_chrf(translation, [reference]).score)
