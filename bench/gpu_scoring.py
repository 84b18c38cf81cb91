"""The questions of bench/scoring.py at full size: MetricX large and XL, xCOMET XL, in bfloat16.

    python -m bench.gpu_scoring [--quick]
    python -m bench.gpu_scoring --size tiny --device cpu     # only to try the script out

Random weights, made on the device, on both sides (bench/kit/random_models.py). One call of many
pairs against upstream's way of calling, and xCOMET in calls of 8 pairs from 4 callers over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scorekit.command import run_command

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console

from bench.common import Measurement, compare, measure, service, table
from bench.kit.random_models import XLMR, Size, backend, folder, random_mt5
from bench.oracle.predict import Upstream
from bench.scoring import CALL, CALLERS, score_in_calls
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.server.local import LocalScorer
from testing.pairs import read_pairs
from testing.work_log import WorkLog, matmul_flops_per_s

DTYPE = "bfloat16"
Pairs = list[SampleForScoring]
Predict = Callable[[Sequence[SampleForScoring]], list[float]]


def questions(sizes: Sequence[Size], device: str, quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script; the last size is xCOMET's as well."""
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    pairs = read_pairs(64 if quick else 1000)
    repeats = 1 if quick else 3
    for size in sizes:
        title = f"MetricX {size}, {len(pairs)} pairs, against one example at a time"
        yield from in_one_call("metricx", size, device, title, 2.0, pairs, repeats)
        _free()
    title = f"xCOMET {sizes[-1]}, {len(pairs)} pairs in one call, against predict(batch_size=16)"
    yield from in_one_call("xcomet", sizes[-1], device, title, 1.25, pairs, repeats)
    _free()
    yield from xcomet_in_calls(sizes[-1], device, pairs, repeats)


def in_one_call(
    kind: Any, size: Size, device: str, title: str, aim: float, pairs: Pairs, repeats: int
) -> Iterator[Measurement]:
    """Compare all pairs in one call of ours with upstream's way of calling."""
    scorer = LocalScorer(backend(kind, size, device, DTYPE, None))
    predict = (one_at_a_time if kind == "metricx" else upstream_predict)(size, device)
    cfg = ScoringConfig(batch_size=len(pairs))
    # Every shape once: kernels are chosen on first use.
    assert None not in scorer.score_batch(pairs, cfg).sequence_scores, "a sample has no score"
    predict(pairs[:32])
    work = WorkLog.watching(scorer.backend)
    timing = compare(lambda: scorer.score_batch(pairs, cfg), lambda: predict(pairs), repeats)
    timing["pairs"] = len(pairs)
    timing["real_tokens_per_s"] = work.real_tokens / repeats / timing["ours_s"]
    yield Measurement(title, timing["times_faster"], "times its rate", at_least=aim, details=timing)
    yield Measurement("  our rate", timing["real_tokens_per_s"], "tokens/s")
    yield Measurement("  padded-token waste of our batches", 100 * work.waste, "%", at_most=5.0)
    if kind == "xcomet":
        yield _share_of_the_card(work, size, device, timing["ours_s"] * repeats)
    if device != "cpu":
        peak = torch.cuda.max_memory_allocated() / 2**30
        yield Measurement("  peak memory of the device, both models", peak, "GiB")


def _share_of_the_card(work: WorkLog, size: Size, device: str, seconds: float) -> Measurement:
    """Compare the encoder's FLOPs per second, padding left out, with the rate of torch.mm alone."""
    shape = XLMR[size]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    rate = matmul_flops_per_s(width, inner, rows=8192, device=device, dtype=DTYPE)
    flops = work.flops(
        padded=False,
        layers=shape["num_hidden_layers"],
        hidden=width,
        intermediate=inner,
        heads=shape["num_attention_heads"],
    )
    return Measurement(
        "  share of the device's rate of products, real tokens",
        100 * flops / seconds / rate,
        "%",
        details={"matmul_tflops_per_s": rate / 1e12, "real_tflops": flops / 1e12},
    )


def xcomet_in_calls(size: Size, device: str, pairs: Pairs, repeats: int) -> Iterator[Measurement]:
    """Measure calls of 8 pairs, 4 callers over HTTP, against `predict` on the same 8 pairs each."""
    calls = [pairs[start : start + CALL] for start in range(0, len(pairs), CALL)]
    predict = upstream_predict(size, device)
    predict(calls[0])
    flags = ("--kind", "xcomet", "--size", size, "--device", device, "--dtype", DTYPE)
    with service("bench.kit.random_models", *flags, "--cache", "memory") as (_, url):
        asyncio.run(score_in_calls(url, calls, {}))
        timing = compare(
            lambda: asyncio.run(score_in_calls(url, calls, {})),
            lambda: [predict(call) for call in calls],
            repeats,
        )
    timing["pairs"] = len(pairs)
    yield Measurement(
        f"xCOMET {size} in calls of {CALL}, {CALLERS} callers over HTTP, against predict",
        timing["times_faster"],
        "times its rate",
        at_least=4.0,
        details=timing,
    )


def one_at_a_time(size: Size, device: str) -> Predict:
    """Score like MetricX's predict.py: one example at a time in file order, with transformers'
    mT5.
    """
    from transformers import AutoTokenizer

    path = folder("metricx", size)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = random_mt5(path, device, DTYPE)
    start = torch.zeros(1, 1, dtype=torch.long, device=device)
    row = model.config.score_token_id

    def predict(pairs: Sequence[SampleForScoring]) -> list[float]:
        scores = []
        with torch.inference_mode():
            for pair in pairs:
                text = f"source: {pair.src} candidate: {pair.mt}"
                ids = torch.tensor([tokenizer(text)["input_ids"][:-1]], device=device)
                logits = model(input_ids=ids, decoder_input_ids=start).logits
                scores.append(float(logits[0, 0, row].clamp(0, 25)))
        return scores

    return predict


def upstream_predict(size: Size, device: str) -> Predict:
    """Return unbabel-comet's `predict` with its defaults. It runs in its own environment."""
    return Upstream("--random", size, DTYPE, device)


def _free() -> None:
    """Give back the device memory of models that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> int:
    """Measure, print the table with the device's name, write the JSON."""
    parser = argparse.ArgumentParser(description="Scoring at full size on a GPU.")
    parser.add_argument("--quick", action="store_true", help="few pairs")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu only to try it out")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print(
            "error: no CUDA device here (--size tiny --device cpu tries the script out)",
            file=sys.stderr,
        )
        return 2
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    sizes: tuple[Size, ...] = ("tiny",) if args.size == "tiny" else ("large", "xl")
    trial = args.quick or args.size == "tiny"
    measurements = measure(
        "gpu_scoring",
        trial,
        lambda _: questions(sizes, args.device, args.quick),
        device=name,
        size=args.size,
    )
    output = table(measurements)
    output.title = f"{name}, bfloat16, random weights" + (
        "; tiny: shows that the script runs, no more" if args.size == "tiny" else ""
    )
    Console().print(output)
    return 0


if __name__ == "__main__":
    run_command(main, stdout="log")
