"""Measure what there is to gain by choosing among a policy's samples, and say it in words.

Shapes: S sources, N different translations of one, of which each was sampled `count` times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from scorekit.paired import (
    FEWEST,
    RESAMPLES,
    SEED,
    PairedStat,
    mean_interval,
    paired_mean,
    paired_stat,
)
from scorekit.rewards.rules import chrf
from trainer.translation.best_of_n.candidates import Candidate, SampledSource
from trainer.translation.evaluation.compare import corpus_metrics

#: The choices, by the name of the values that they follow.
REWARD, OWN, REVERSE = "reward", "own log-probability", "reverse log-probability"
BOTH = "own + reverse"
MBR, ORACLE = "MBR (chrF)", "oracle (chrF)"
GREEDY, MEAN = "greedy", "mean sample"


@dataclass(frozen=True, slots=True)
class ScoredSource:
    """A source with what its translations are chosen by.

    candidates: those with a reward, [N]; `greedy` is one of them.
    values: name of a choice -> the value of each, [N], higher is better; -inf is never chosen.
    chrf: sentence chrF of each, [N]; None without a reference.
    """

    pair: str
    ref: str | None
    candidates: list[Candidate]
    greedy: Candidate
    greedy_chrf: float | None
    values: dict[str, list[float]]
    chrf: list[float] | None


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """A way to choose one of a source's translations, beside greedy ones.

    reward, chrf, bleu: means over the sources (BLEU of the corpus), `first` greedy's and `second`
    the choice's; None without references, BLEU also with several language pairs.
    length: characters of its translations, relative to the references, else to greedy ones.
    rank_correlation: of its values with sentence chrF within a source, Spearman, mean over the
    sources that have one, with its 95 % interval; None without.
    """

    name: str
    reward: PairedStat
    chrf: PairedStat | None
    bleu: PairedStat | None
    length: float
    rank_correlation: tuple[float, float | None, float | None, int] | None


@dataclass(frozen=True, slots=True)
class Headroom:
    """The result for a policy.

    samples: of each source.
    different: mean number of different ones.
    left_out: sources without a reward of a sample or of the greedy translation.
    unscored: samples without a reward, of all sources; they take part in nothing.
    choices: `greedy` first.
    """

    samples: int
    sources: int
    left_out: int
    unscored: int
    different: float
    has_references: bool
    choices: list[MeasuredChoice]

    def choice(self, name: str) -> MeasuredChoice | None:
        """Return the choice of a name, if there is one."""
        return next((choice for choice in self.choices if choice.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return the contents of headroom.json."""
        return asdict(self) | {"resamples": RESAMPLES, "seed": SEED, "in_words": in_words(self)}


def score_source(
    source: SampledSource, logprobs: dict[str, list[float | None]]
) -> ScoredSource | None:
    """Return a source with the values of its scored candidates; None without two rewards.

    logprobs: name of a choice -> mean log-probability of each candidate; None: it has none.
    """
    candidates = source.candidates
    assert source.greedy is not None, "collect greedy translations, too"
    greedy, ref = candidates[source.greedy], source.example.ref_text
    scored = [i for i, c in enumerate(candidates) if c.reward is not None and c.count]
    if greedy.reward is None or not scored:
        return None
    chosen = [candidates[i] for i in scored]
    values = {REWARD: [c.reward or 0.0 for c in chosen]}
    for name, of_all in logprobs.items():
        values[name] = [-math.inf if (v := of_all[i]) is None else v for i in scored]
    if OWN in values and REVERSE in values:
        values[BOTH] = [a + b for a, b in zip(values[OWN], values[REVERSE], strict=True)]
    values[MBR] = mbr(chosen)
    quality = None
    if ref:
        quality = [chrf({"mt": c.text, "ref": ref}) or 0.0 for c in chosen]
        values[ORACLE] = quality
    example = source.example
    return ScoredSource(
        f"{example.src_lang_code}>{example.tgt_lang_code}",
        ref or None,
        chosen,
        greedy,
        chrf({"mt": greedy.text, "ref": ref}),
        values,
        quality,
    )


def mbr(candidates: Sequence[Candidate]) -> list[float]:
    """Return the mean chrF of each candidate against all samples, itself included."""
    total = sum(candidate.count for candidate in candidates)
    means = []
    for candidate in candidates:
        gains = (
            other.count * (100.0 if other is candidate else _chrf(candidate.text, other.text))
            for other in candidates
        )
        means.append(math.fsum(gains) / total)
    return means


def _chrf(text: str, other: str) -> float:
    """Return sentence chrF of a text; 0 against an empty one."""
    return chrf({"mt": text, "ref": other}) or 0.0


def measure(
    sources: Sequence[SampledSource], scored: Sequence[ScoredSource | None], samples: int
) -> Headroom:
    """Return the headroom of the sources.

    samples: of each of them.
    """
    used = [source for source in scored if source is not None]
    names = list(used[0].values) if used else []
    has_references = any(source.ref for source in used)
    names = [name for name in names if name != ORACLE] + [ORACLE] * has_references
    metrics = corpus_metrics([source.pair for source in used if source.ref])
    measured = [_choice(name, used, metrics.get("bleu")) for name in (GREEDY, MEAN, *names)]
    unscored = sum(c.count for s in sources for c in s.candidates if c.reward is None)
    different = [sum(1 for c in s.candidates if c.count) for s in sources]
    return Headroom(
        samples,
        len(used),
        len(sources) - len(used),
        unscored,
        sum(different) / max(1, len(different)),
        has_references,
        measured if used else [],
    )


def _weights(name: str, source: ScoredSource) -> list[tuple[Candidate, float | None, int]]:
    """Return (candidate, chrF, how often) of what a choice takes of a source."""
    quality: Sequence[float | None] = source.chrf or [None] * len(source.candidates)
    if name == GREEDY:
        return [(source.greedy, source.greedy_chrf, 1)]
    if name == MEAN:
        return [
            (candidate, value, candidate.count)
            for candidate, value in zip(source.candidates, quality, strict=True)
        ]
    values = source.values[name]
    best = max(range(len(values)), key=lambda i: (values[i], source.candidates[i].count))
    return [(source.candidates[best], quality[best], 1)]


def _choice(name: str, used: Sequence[ScoredSource], bleu: Any) -> MeasuredChoice:
    """Return the stats of one choice beside greedy translations."""
    chosen = [(_weights(GREEDY, source), _weights(name, source)) for source in used]
    rewards = [[_mean((c.reward, n) for c, _, n in side) for side in pair] for pair in chosen]
    with_ref = [
        (source, pair) for source, pair in zip(used, chosen, strict=True) if source.ref is not None
    ]
    left_out = len(used) - len(with_ref)
    quality = bleus = None
    if with_ref:
        pairs = [[_mean((v, n) for _, v, n in side) for side in pair] for _, pair in with_ref]
        quality = paired_mean("chrF", "chrf", pairs, left_out, True)
    if with_ref and bleu is not None:
        stats = [[_bleu_stats(bleu, side, s.ref) for side in pair] for s, pair in with_ref]
        score = partial(_corpus_score, metric=bleu)
        array = np.array(stats, dtype=np.float64)
        bleus = paired_stat("BLEU", "bleu", array, left_out, score, True)
    lengths = [_mean((len(c.text), n) for c, _, n in side) for _, side in chosen]
    bases = [len(source.ref or "") for source in used]
    if len(with_ref) < len(used):
        bases = [len(source.greedy.text) for source in used]
    return MeasuredChoice(
        name,
        paired_mean("reward", "reward", rewards, 0, True),
        quality,
        bleus,
        math.fsum(lengths) / max(1, sum(bases)),
        _correlation(name, used),
    )


def _mean(weighted: Any) -> float:
    pairs = list(weighted)
    return math.fsum(value * n for value, n in pairs) / sum(n for _, n in pairs)


def _bleu_stats(bleu: Any, side: Sequence[tuple[Candidate, Any, int]], ref: str | None) -> Any:
    """Return the statistics of the translations of a source; they add up over sources."""
    texts = [candidate.text for candidate, _, _ in side]
    stats = bleu._extract_corpus_statistics(texts, [[ref] * len(texts)])
    return sum(n * np.array(row) for row, (_, _, n) in zip(stats, side, strict=True))


def _corpus_score(sums: Any, metric: Any) -> float:
    return float(metric._compute_score_from_stats([int(value) for value in sums]).score)


def _correlation(
    name: str, used: Sequence[ScoredSource]
) -> tuple[float, float | None, float | None, int] | None:
    """Return (mean, low, high, number of sources) of Spearman's rho with chrF within a source."""
    if name in (GREEDY, MEAN, ORACLE):
        return None
    values = [
        rho
        for source in used
        if source.chrf is not None
        and (rho := spearman(source.values[name], source.chrf)) is not None
    ]
    if not values:
        return None
    low, high = mean_interval(values) if len(values) >= FEWEST else (None, None)
    return sum(values) / len(values), low, high, len(values)


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the correlation of the ranks; None with fewer than 3 values, or equal ones."""
    if len(first) < 3:
        return None
    ranks = [_ranks(values) for values in (first, second)]
    centred = [values - values.mean() for values in ranks]
    norm = math.sqrt(float((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / norm if norm else None


def _ranks(values: Sequence[float]) -> Any:
    """Return the ranks, equal values with their mean rank."""
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def in_words(result: Headroom) -> str:
    """Return one paragraph: what there is to gain by this reward."""
    best = result.choice(REWARD)
    if best is None:
        return "No source has rewards: there is nothing to say."
    n = result.samples
    if best.chrf is None:
        return (
            f"There are no references. From greedy to the best of {n} the reward rises by "
            f"{_change(best.reward, 3)}. Whether the translations get better, a reward cannot say."
        )
    gain, oracle = best.chrf, result.choice(ORACLE)
    possible = oracle.chrf if oracle is not None else None
    start = f"The best of {n} by the reward has {_change(gain, 2)} chrF over greedy"
    if gain.low is None or possible is None or possible.difference is None:
        text = f"{start}: with fewer than {FEWEST} sources that says little."
    elif gain.verdict == "better":
        text = (
            f"{start}, of {possible.difference:+.2f} that the reference would choose: the reward "
            "finds better translations than the policy prefers, and training has something to "
            "teach. It carries over a part of that: compare with more SFT of the same time."
        )
    elif gain.verdict == "worse":
        text = (
            f"{start}: the reward prefers worse translations than the policy. Training on it would "
            "lower the quality. Change the reward first."
        )
    elif possible.verdict == "better":
        text = (
            f"{start}, which is not clear of 0, while the reference would choose "
            f"{_change(possible, 2)}: the policy can write better translations, but it is not "
            "shown that this reward finds them. Change the reward, or take more sources."
        )
    else:
        text = (
            f"{start}, and the reference would choose {_change(possible, 2)}: neither is clear of "
            "0. Take more sources, or more samples of each."
        )
    rivals = [c for c in result.choices if c.name not in (GREEDY, MEAN, ORACLE, REWARD)]
    ahead = [c for c in rivals if c.chrf and (c.chrf.second or 0) > (gain.second or 0)]
    if ahead:
        top = max(ahead, key=lambda c: (c.chrf and c.chrf.second) or 0.0)
        assert top.chrf is not None
        text += f" Without this reward, {top.name} has {_change(top.chrf, 2)}."
    return text


def _change(stat: PairedStat, digits: int) -> str:
    """Return a change with its interval."""
    text = f"{stat.difference:+.{digits}f}"
    if stat.low is None:
        return text
    return f"{text} [{stat.low:+.{digits}f}, {stat.high:+.{digits}f}]"
