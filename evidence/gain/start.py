"""Make the frozen start and its metrics: a policy that SFT has trained to its end, by chrF.

    python -m evidence.gain.start policy
    python -m evidence.gain.start metrics
    python -m evidence.gain.start policy --direction ko-en

`policy` trains on demo/data/{sft,pydocs}.jsonl (demo/train/policy.py), then goes on in rounds until
chrF of the development set stays where it is: a flat loss says nothing (docs/explanation/evidence).
The best round until then is frozen; the round after it is a rival of RL, and may rise once more.
`metrics` trains the demo's two metrics further on that policy's own samples. Their sources
are those of demo/data/rl_prompts.jsonl: the policy never saw them, and no run trains on them.
Neither saw a translation of a prompt or of a measured source. What is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT
from demo.train import judge, metricx, policy, xcomet
from demo.train.common import endless, fit, parameter_groups, sentence_chrf, setup
from demo.train.data import read_jsonl, write_jsonl
from demo.train.examples import Example, Labeller
from evidence.gain.arms import LEAST_GAIN, folder_of
from evidence.gain.data import (
    DIRECTIONS,
    TRACKED,
    Direction,
    metric_rows,
    read_rows,
    split_held_out,
)
from scorekit.command import run_command
from scorekit.files import replacing_folder, write_atomic
from trainer.translation.evaluation.compare import reference_stats

MODELS = ROOT / "demo/models"
#: Returns the quality of (sample, reference), 0 to 100.
Quality = Callable[[str, str], float]
#: Rounds at most. The first one without a gain ends the training.
ROUNDS = 3
#: Peak learning rate of a round. A round has a warm-up and ends at 0, so it must be long enough to
#: win back what its warm-up loses.
RATE = 1e-3


def development(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows for development."""
    return split_held_out(rows["heldout"], rows["dev"], TRACKED)[1]


def is_flat(values: Sequence[float], least_gain: float = LEAST_GAIN) -> bool:
    """Return whether the last value is not `least` above the best of those before it."""
    return len(values) > 1 and values[-1] < max(values[:-1]) + least_gain


def quality(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], pair: str
) -> dict[str, float]:
    """Return chrF and BLEU of greedy translations, and the loss of a reference's token.

    pair: the languages.
    """
    sources, references = ([row[key] for row in rows] for key in ("src_text", "ref_text"))
    greedy = policy.sample(model, tokenizer, sources, 0.0)
    stats = reference_stats([pair] * len(rows), greedy, references)
    items = [policy.pair_ids(tokenizer, *pair) for pair in zip(sources, references, strict=True)]
    with torch.no_grad():
        loss = policy.lm_loss(model, items).item()
    return {"chrf": stats["chrf"], "bleu": stats["bleu"], "loss": loss}


def copy_tokenizers() -> None:
    """Put the demo's tokenizers where demo/train looks for them, unless some are there."""
    skipped = shutil.ignore_patterns("model.safetensors")
    for source, out in (
        (MODELS / "policy", policy.TOKENIZER),
        (MODELS / "metricx", metricx.TOKENIZER),
        (MODELS / "xcomet/encoder", xcomet.TOKENIZER),
    ):
        if not out.is_dir():
            shutil.copytree(source, out, ignore=skipped)


def make_policy(
    folder: Path, direction: Direction, steps: int, round_steps: int, limit: int | None
) -> dict[str, Any]:
    """Train the policy until chrF is flat, and one round more; the best is copied to folder/policy.

    steps, round_steps: of the first training and of a round.
    limit: rows to measure at most.
    """
    rows = read_rows(direction)
    training, measured = folder / "sft", development(rows)[:limit]
    pairs = [*rows["sft"], *rows["pydocs"]]
    if not (training / "final").is_dir():
        policy.train(_policy_options(training, steps), pairs, rows["dev"])
    curve: list[dict[str, Any]] = []
    stages = [("at25", 0), ("at50", 0), ("final", 0)]
    for name, extra in stages:
        model, tokenizer = policy.load(training / name)
        values = quality(model, tokenizer, measured, direction.pair)
        curve.append({"stage": name, "extra": extra, **values})
        print(curve[-1], flush=True)
    items = [policy.pair_ids(tokenizer, row["src_text"], row["ref_text"]) for row in pairs]
    rng = random.Random(1)
    batches = endless([len(ids) for ids, _ in items], 900, rng)
    rounds = [curve[-1]]

    def add_round(number: int) -> None:
        """Train a round from the one before, unless it is there, and measure it."""
        nonlocal model
        path = training / f"round{number}"
        if path.is_dir():
            for _ in range(round_steps):  # so that later rounds read what they would have read
                next(batches)
            model, _ = policy.load(path)
        else:
            model.train()

            def loss(step: int) -> torch.Tensor:
                return policy.lm_loss(model, [items[i] for i in next(batches)])

            fit(list(model.parameters()), loss, round_steps, RATE, None, path.name)
            with replacing_folder(path) as part:
                policy.save(model, tokenizer, part)
            model, _ = policy.load(path)  # the weights as they are saved are what is measured
        values = quality(model, tokenizer, measured, direction.pair)
        rounds.append({"stage": path.name, "extra": number * round_steps, **values})
        print(rounds[-1], flush=True)

    for number in range(1, ROUNDS + 1):
        add_round(number)
        if is_flat([entry["chrf"] for entry in rounds]):
            break
    best = max(rounds, key=lambda entry: entry["chrf"])
    was_flat = is_flat([entry["chrf"] for entry in rounds])
    if best is rounds[-1]:
        add_round(len(rounds))  # a rival of RL: what the same time of SFT gives
    shutil.copytree(training / best["stage"], folder / "policy", dirs_exist_ok=True)
    stats = {"curve": curve[:-1] + rounds, "chosen": best["stage"], "is_flat": was_flat}
    write_atomic(folder / "start.json", json.dumps(stats, indent=1) + "\n")
    return stats


def _policy_options(out: Path, steps: int) -> argparse.Namespace:
    """Return the options of demo/train/policy.py."""
    return argparse.Namespace(
        command="train", out=out, steps=steps, budget=900, lr=2e-3, seed=1,
        copy=0.0, cut=0.0, start=None,
    )  # fmt: skip


def make_candidates(folder: Path, direction: Direction, limit: int | None) -> None:
    """Sample what the metrics learn from: the start and a half-trained stage, on sources that are
    new to them; and the development set.
    """
    all_rows = read_rows(direction)
    rows = metric_rows(direction, all_rows)[:limit]
    stages = [("policy", (0.0, 0.8, 0.8, 0.8)), ("sft/at50", (0.8,))]
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for name, temperatures in stages:
        model, tokenizer = policy.load(folder / name)
        for temperature in temperatures:
            texts = policy.sample(model, tokenizer, [r["src_text"] for r in rows], temperature)
            for row, text in zip(rows, texts, strict=True):
                line = {"src": row["src_text"], "ref": row["ref_text"], "mt": text}
                out[line["src"], line["mt"]] = line
    model, tokenizer = policy.load(folder / "policy")
    measured = development(all_rows)[:limit] * 4
    texts = policy.sample(model, tokenizer, [r["src_text"] for r in measured], 0.8)
    folder = folder / "candidates"
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "samples.jsonl", list(out.values()))
    dev = zip(measured, texts, strict=True)
    lines = [{"src": row["src_text"], "ref": row["ref_text"], "mt": text} for row, text in dev]
    write_jsonl(folder / "dev.jsonl", lines)


def examples_of(
    tokenizer: Any, folder: Path, direction: Direction, quality: Quality
) -> list[Example]:
    """Return the labelled samples, and the true translation of every source."""
    labeller = Labeller(tokenizer, direction.untranslated, quality)
    lines = read_jsonl(folder / "samples.jsonl")
    out = [labeller.sample(line["src"], line["mt"], line["ref"]) for line in lines]
    truths = {line["src"]: line["ref"] for line in lines}
    return out + [labeller.sample(src, ref, ref) for src, ref in truths.items()]


def train_metricx(folder: Path, direction: Direction, steps: int, quality: Quality) -> str:
    """Train the demo's MetricX further; return its rank correlations."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "metricx")
    model = metricx.Scorer(tokenizer)
    body = type(model.body).from_pretrained(MODELS / "metricx", dtype=torch.float32)
    model.body.load_state_dict(body.state_dict(), strict=False)
    with torch.no_grad():
        score_row = body.lm_head.weight[body.config.score_token_id]
        model.row.weight[0] = score_row / metricx.SCALE
    candidates, rank = folder / "candidates", judge.dev_figures
    measure_dev = partial(rank, tokenizer=tokenizer, folder=candidates)
    before = measure_dev(lambda e: [-s for s in model.predict(e)])
    examples = examples_of(tokenizer, candidates, direction, quality)
    batches = _batches(examples, extra=6)
    model.train()
    groups = parameter_groups(model, 6e-4)
    fit(groups, lambda _: model.qe_loss(next(batches), False, 1.0), steps, 6e-4, None, "metricx")
    metricx.export(model, tokenizer, folder / "metricx")
    return f"{before} -> {measure_dev(lambda e: [-s for s in model.predict(e)])}"


def train_xcomet(folder: Path, direction: Direction, steps: int, quality: Quality) -> str:
    """Train the demo's xCOMET further; return its rank correlations."""
    from services.xcomet.tokenizer import read_tokenizer

    encoder = MODELS / "xcomet/encoder"
    tokenizer = read_tokenizer("XLM-RoBERTa-XL", str(encoder), local=True)
    model = xcomet.new_model()
    saved = torch.load(MODELS / "xcomet/checkpoints/model.ckpt", weights_only=True)
    state = {name: value.float() for name, value in saved["state_dict"].items()}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    candidates = folder / "candidates"
    measure_dev = partial(judge.dev_figures, tokenizer=tokenizer, folder=candidates)
    before = measure_dev(lambda e: xcomet.predict(model, e))
    examples = examples_of(tokenizer, candidates, direction, quality)
    batches = _batches(examples, extra=5)
    fix = torch.nn.Linear(256, 256)
    model.train()
    parameters = [*model.parameters(), *fix.parameters()]

    def loss(step: int) -> torch.Tensor:
        return xcomet.qe_loss(model, fix, next(batches), "src", 1.0)

    fit(parameters, loss, steps, 5e-4, None, "xcomet")
    xcomet.export(model, folder / "xcomet")
    return f"{before} -> {measure_dev(lambda e: xcomet.predict(model, e))}"


def _batches(examples: list[Example], extra: int) -> Any:
    """Yield batches with several candidates of a source."""
    options = argparse.Namespace(seed=1, within=1.0, budget=1200)
    for indices in judge.batches_of(examples, options, extra):
        yield [examples[i] for i in indices]


def make_metrics(
    folder: Path,
    direction: Direction,
    steps: int,
    limit: int | None,
    quality: Quality = sentence_chrf,
) -> dict[str, str]:
    """Train both metrics; return their rank correlations with chrF, before and after.

    quality: what the metrics learn to say of a sample.
    """
    if not (folder / "candidates/dev.jsonl").is_file():
        make_candidates(folder, direction, limit)
    path = folder / "metrics.json"
    stats: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    for name, train in (("metricx", train_metricx), ("xcomet", train_xcomet)):
        if name not in stats:
            stats[name] = train(folder, direction, steps, quality)
            print(name, stats[name], flush=True)
            write_atomic(path, json.dumps(stats, indent=1) + "\n")
    return stats


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["policy", "metrics"])
    parser.add_argument("--direction", choices=list(DIRECTIONS), default="en-ko")
    parser.add_argument("--out", type=Path, help="folder of the start")
    parser.add_argument("--steps", type=int, help="of the first training, or of each metric")
    parser.add_argument("--round-steps", type=int, default=1200, help="of a round of the policy")
    parser.add_argument("--limit", type=int, help="rows to sample and to measure, at most")
    args = parser.parse_args()
    setup(1)
    copy_tokenizers()
    direction = DIRECTIONS[args.direction]
    out = args.out or folder_of(direction) / "start"
    if args.part == "policy":
        steps = args.steps or 2700
        stats: Any = make_policy(out, direction, steps, args.round_steps, args.limit)
    else:
        stats = make_metrics(out, direction, args.steps or 600, args.limit)
    print(json.dumps(stats, indent=1))


if __name__ == "__main__":
    run_command(main)
