"""Measure the three demo models on held-out sources; prints the figures and writes JSON.

    python -m demo.train.evaluate_models --split final_test --out demo/models/evaluation.json

Figures: greedy chrF and BLEU of the policy; Spearman of both metrics with sentence chrF over
samples of the policy, overall and inside a source; character F1 of the error spans on synthetic
errors; and bad outputs (copy, empty, unrelated, repeated) against the true translation.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from demo.train import corrupt
from demo.train.checkpoints import MetricX, XComet
from demo.train.common import sentence_chrf, setup
from demo.train.data import DATA, read_jsonl
from demo.train.examples import pool_of
from demo.train.judge import correlations
from demo.train.policy import load, sample
from scorekit.command import run_command

MODELS = DATA.parent / "models"


def translation(outputs: list[str], references: list[str]) -> dict:
    """Return corpus chrF, BLEU with two tokenizations, and the length in characters."""
    chrf, char_bleu, word_bleu = CHRF(), BLEU(tokenize="char"), BLEU(tokenize="13a")
    return {
        "chrF": chrf.corpus_score(outputs, [references]).score,
        "BLEU (char)": char_bleu.corpus_score(outputs, [references]).score,
        "BLEU (13a)": word_bleu.corpus_score(outputs, [references]).score,
        "mean sentence chrF": mean(map(sentence_chrf, outputs, references)),
        "characters": mean(len(text) for text in outputs),
        "reference characters": mean(len(text) for text in references),
        "greedy outputs with Korean letters": mean(
            any("가" <= c <= "힣" for c in text) for text in outputs
        ),
    }


def mean(values: Any) -> float:
    """Return the arithmetic mean."""
    values = list(values)
    return sum(values) / len(values)


def sampled_correlation(
    policy: Any, metricx: Any, xcomet: Any, rows: list[dict], temperature: float, copies: int
) -> dict:
    """Return Spearman with sentence chrF over the policy's samples of every source."""
    model, tokenizer = policy
    rows = rows * copies
    sources, refs = [r["src_text"] for r in rows], [r["ref_text"] for r in rows]
    outputs = sample(model, tokenizer, sources, temperature)
    chrf = list(map(sentence_chrf, outputs, refs))
    stats: dict[str, Any] = {
        "samples": len(rows),
        "temperature": temperature,
        "mean sentence chrF": mean(chrf),
    }
    by_metric = {
        "metricx": metricx(sources, outputs),
        "xcomet": xcomet(sources, outputs)[0],
        "metricx with reference": metricx(sources, outputs, refs),
        "xcomet with reference": xcomet(sources, outputs, refs)[0],
    }
    for name, scores in by_metric.items():
        overall, within = correlations(sources, scores, chrf)
        stats[name] = {"overall": overall, "within a source": within}
        sign = -1 if name.startswith("metricx") else 1
        stats[name]["best of the samples, chrF"] = best_of(sources, scores, chrf, sign)
    stats["oracle best, chrF"] = best_of(sources, chrf, chrf, 1)
    return stats


def best_of(groups: list[str], scores: list[float], chrf: list[float], sign: int) -> float:
    """Return the mean chrF of the sample that the metric likes best, one per source."""
    best: dict[str, tuple[float, float]] = {}
    for group, score, value in zip(groups, scores, chrf, strict=True):
        if group not in best or sign * score > best[group][0]:
            best[group] = (sign * score, value)
    return mean(value for _, value in best.values())


def spans_f1(xcomet: Any, rows: list[dict], seed: int) -> dict:
    """Return character F1 of predicted spans on damaged true translations (severity not
    compared).
    """
    rng, pool = random.Random(seed), pool_of(rows)
    kinds = {k: w for k, w in corrupt.INSIDE.items() if k not in (corrupt.drop, corrupt.truncate)}
    cases = []
    for row in rows:
        kind = corrupt.draw(kinds, rng)
        cases.append((row, kind.__name__, *kind(row["src_text"], row["ref_text"], pool, rng)))
    _, predicted = xcomet([c[0]["src_text"] for c in cases], [c[2] for c in cases])
    counts: dict[str, list[int]] = {"all": [0, 0, 0]}
    severity_hits = [0, 0]
    for (_, kind, text, truth), spans in zip(cases, predicted, strict=True):
        gold = {i: s for a, b, s in truth for i in range(a, b) if text[i] != " "}
        marked = {
            i: s["severity"] for s in spans for i in range(s["start"], s["end"]) if text[i] != " "
        }
        both = gold.keys() & marked.keys()
        severity_hits[0] += sum(gold[i] == marked[i] for i in both)
        severity_hits[1] += len(both)
        for name in ("all", kind):
            count = counts.setdefault(name, [0, 0, 0])
            count[0] += len(both)
            count[1] += len(marked)
            count[2] += len(gold)
    stats: dict[str, Any] = {name: prf(*count) for name, count in counts.items()}
    stats["right severity where both mark"] = severity_hits[0] / max(1, severity_hits[1])
    return stats


def prf(both: int, predicted: int, gold: int) -> dict:
    """Return precision, recall and F1 of character counts."""
    return {
        "precision": both / max(1, predicted),
        "recall": both / max(1, gold),
        "F1": 2 * both / max(1, predicted + gold),
    }


def bad_outputs(metricx: Any, xcomet: Any, rows: list[dict], seed: int) -> dict:
    """Return mean scores of the truth and of bad outputs, and how often the truth wins."""
    rng = random.Random(seed)
    sources, refs = [r["src_text"] for r in rows], [r["ref_text"] for r in rows]
    other = refs[:]
    rng.shuffle(other)
    variants = {
        "true translation": refs,
        "copy of the source": sources,
        "empty": [""] * len(rows),
        "unrelated Korean": other,
        "repeated three times": [" ".join([ref] * 3) for ref in refs],
    }
    stats = {}
    for name, texts in variants.items():
        m, (x, _) = metricx(sources, texts), xcomet(sources, texts)
        if name == "true translation":
            truth = (m, x)
        stats[name] = {"metricx": mean(m), "xcomet": mean(x)}
        differ = [i for i in range(len(rows)) if texts[i] != refs[i]]
        if differ:
            stats[name] |= {
                "metricx truth wins": mean(truth[0][i] < m[i] for i in differ),
                "xcomet truth wins": mean(truth[1][i] > x[i] for i in differ),
            }
    return stats


def measure(args: argparse.Namespace) -> dict:
    """Return all stats."""
    rows = read_jsonl(DATA / f"{args.split}.jsonl")
    policy = load(args.models / "policy")
    metricx, xcomet = MetricX(args.models / "metricx"), XComet(args.models / "xcomet")
    sources, refs = [r["src_text"] for r in rows], [r["ref_text"] for r in rows]
    greedy = sample(*policy, sources, 0.0)
    stats = {"split": args.split, "sources": len(rows), "seed": args.seed}
    stats["policy"] = translation(greedy, refs)
    stats["policy"] |= {
        "metricx": mean(metricx(sources, greedy)),
        "xcomet": mean(xcomet(sources, greedy)[0]),
    }
    stats["samples"] = [
        sampled_correlation(policy, metricx, xcomet, rows, temperature, 8)
        for temperature in args.temperatures
    ]
    stats["span F1"] = spans_f1(xcomet, rows, args.seed)
    stats["bad outputs"] = bad_outputs(metricx, xcomet, rows, args.seed)
    return stats


def rounded(value: Any) -> Any:
    """Return the stats rounded to three decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", default="heldout", choices=["heldout", "final_test", "dev"])
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    setup(args.seed)
    text = json.dumps(rounded(measure(args)), indent=1, ensure_ascii=False)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
