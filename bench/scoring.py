"""Compare our batches with upstream's own way of calling the same checkpoint.

Same pairs, same process tree, same precision, one thread a model, no cache; the two sides run in
turn, and a figure is the ratio of the medians. The checkpoints have 25 million parameters outside
their embeddings (bench/checkpoints.py), and once the demo's small MetricX.

    python -m bench.scoring [--quick]
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from bench import checkpoints
from bench.common import (
    ROOT,
    Measurement,
    compare,
    largest_difference,
    redis_server,
    run,
    service,
    timed,
)
from bench.oracle.predict import Upstream
from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.scorers import SampleForScoring, ScoringConfig
from testing.pairs import read_pairs
from testing.work_log import WorkLog, matmul_flops_per_s, waste_percent

Pairs = list[SampleForScoring]
CALL = 8  # pairs that a trainer sends at once
CALLERS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Holds the sizes of the measurement."""

    pairs: int = 1000
    repeats: int = 5
    job_repeats: int = 3  # of the job with a cold and a warm Redis


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # Lightning's notes, once a call
    warnings.filterwarnings("ignore")
    sizes = Sizes(64, 1, 1) if quick else Sizes()
    pairs = read_pairs(sizes.pairs)
    xcomet, metricx = checkpoints.xcomet(), checkpoints.metricx()
    yield from xcomet_in_one_call(xcomet, pairs, sizes.repeats)
    yield from xcomet_in_calls(xcomet, pairs, sizes.repeats)
    for name, folder in (("25 M", metricx), ("demo", ROOT / "demo/models/metricx")):
        yield from metricx_against_one_at_a_time(name, folder, pairs, sizes.repeats)
    yield from in_bfloat16(xcomet, metricx, pairs, sizes.repeats)
    yield from second_run_with_redis(xcomet, pairs, sizes.job_repeats)


# -- xCOMET ----------------------------------------------------


def _upstream(folder: Path, dtype: torch.dtype = torch.float32) -> Upstream:
    return Upstream(str(folder), str(dtype).removeprefix("torch."))


def _local_xcomet(folder: Path, dtype: str = "float32") -> Any:
    from services.xcomet.model import XCometXLScorer

    return XCometXLScorer(str(folder), device="cpu", dtype=dtype, threads=1)


def xcomet_in_one_call(folder: Path, pairs: Pairs, repeats: int) -> Iterator[Measurement]:
    """Measure all pairs in one call; waste and arithmetic are counted in the same runs."""
    scorer, predict = _local_xcomet(folder), _upstream(folder)
    cfg = ScoringConfig(batch_size=len(pairs))
    scorer.score_batch(pairs[:CALL], cfg)
    predict(pairs[:CALL])
    work = WorkLog.watching(scorer.backend)
    shape = checkpoints.XCOMET
    rate = matmul_flops_per_s(shape["hidden"], shape["intermediate"], rows=1024)
    timing = compare(lambda: scorer.score_batch(pairs, cfg), lambda: predict(pairs), repeats)
    rate = max(rate, matmul_flops_per_s(shape["hidden"], shape["intermediate"], rows=1024))
    timing["pairs"] = len(pairs)
    question = f"xCOMET 25 M, {len(pairs)} pairs in one call, against predict(batch_size=16)"
    yield Measurement(
        question, timing["times_faster"], "times its rate", at_least=1.25, details=timing
    )
    local_scores = scorer.score_batch(pairs, cfg).sequence_scores
    difference = largest_difference(local_scores, predict(pairs))
    yield Measurement("  largest difference of its scores", difference, "", at_most=1e-5)
    details: dict[str, Any] = {"real_tokens": work.real_tokens, "padded_tokens": work.padded_tokens}
    yield Measurement(
        "  padded-token waste of our batches",
        100 * work.waste,
        "%",
        at_most=5.0,
        details=details | {"batches": work.batches},
    )
    yield from _share_of_the_machine(work, rate, timing["ours_s"], repeats)


def _share_of_the_machine(
    work: WorkLog, rate: float, seconds: float, repeats: int
) -> Iterator[Measurement]:
    """Compare the encoder's FLOPs per second with the rate of torch.mm alone.

    The FLOPs are those of the encoder's linear layers and attention. torch.mm multiplies the same
    shapes, with as many rows as a batch has tokens. Its rate is the better one of a measurement
    before the runs and one after them.
    """
    shape = checkpoints.XCOMET
    runs = repeats + 1  # the one for the scores was watched, too
    real = work.flops(padded=False, **shape) / runs
    padded = work.flops(padded=True, **shape) / runs
    details = {
        "matmul_gflops_per_s": rate / 1e9,
        "real_gflops": real / 1e9,
        "padded_gflops": padded / 1e9,
        "share_with_padding_percent": 100 * padded / seconds / rate,
        "share_of_the_seconds_in_forward_percent": 100 * work.seconds / runs / seconds,
    }
    yield Measurement(
        "  share of the machine's matrix-product rate, real tokens",
        100 * real / seconds / rate,
        "%",
        details=details,
    )


def xcomet_in_calls(folder: Path, pairs: Pairs, repeats: int) -> Iterator[Measurement]:
    """Measure calls of 8 pairs, 4 callers over HTTP, against `predict` on the same 8 pairs each.

    `predict` gets one call after another, because it is not thread-safe.
    """
    predict = _upstream(folder)
    calls = [pairs[start : start + CALL] for start in range(0, len(pairs), CALL)]
    predict(calls[0])
    scores: dict[int, list[float]] = {}

    def upstream_calls() -> list[float]:
        return [score for call in calls for score in predict(call)]

    with service(
        "services.xcomet", "--model", str(folder), "--threads", "1", "--cache", "memory"
    ) as (_, url):
        asyncio.run(score_in_calls(url, calls[:CALLERS], {}))
        timing = compare(
            lambda: asyncio.run(score_in_calls(url, calls, scores)), upstream_calls, repeats
        )
        waste = waste_percent(url)
    timing["pairs"] = len(pairs)
    yield Measurement(
        f"xCOMET 25 M in calls of {CALL}, {CALLERS} callers over HTTP, against predict",
        timing["times_faster"],
        "times its rate",
        at_least=1.2,
        details=timing,
    )
    yield Measurement("  padded-token waste of its batches", waste, "%")
    service_scores = [score for k in range(len(calls)) for score in scores[k]]
    yield Measurement(
        "  largest difference of its scores",
        largest_difference(service_scores, upstream_calls()),
        "",
        at_most=1e-5,
    )


async def score_in_calls(url: str, calls: list[Pairs], scores: dict[int, list[float]]) -> None:
    """Score the calls, four at a time, without the cache; call k's scores go to scores[k]."""
    waiting = iter(enumerate(calls))
    async with ScoringClient(url, max_in_flight=CALLERS) as client:

        async def caller() -> None:
            for index, call in waiting:
                results = await client.score(call, {"cache": False})
                assert all(r.ok for r in results), "a sample has no score"
                scores[index] = [r.score for r in results if r.ok]

        await asyncio.gather(*(caller() for _ in range(CALLERS)))


# -- MetricX ----------------------------------------------------


class UpstreamMetricX:
    """Scores like upstream's predict.py: one example at a time, in file order, with transformers'
    own mT5.

    The costs of its Trainer are left out, which favors upstream.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from demo.train.checkpoints import MetricX

        self.plain = MetricX(folder)
        self.plain.model.to(dtype)

    def __call__(self, pairs: Sequence[SampleForScoring]) -> list[float]:
        """Return the scores in order."""
        return [self.plain([pair.src], [pair.mt])[0] for pair in pairs]


def _local_metricx(folder: Path, dtype: str = "float32") -> Any:
    from services.metricx.model import MetricXQEScorer

    return MetricXQEScorer(str(folder), device="cpu", dtype=dtype, threads=1)


def metricx_against_one_at_a_time(
    name: str, folder: Path, pairs: Pairs, repeats: int
) -> Iterator[Measurement]:
    """Compare all pairs in one call with one at a time."""
    scorer, predict = _local_metricx(folder), UpstreamMetricX(folder)
    cfg = ScoringConfig(batch_size=len(pairs))
    scorer.score_batch(pairs[:CALL], cfg)
    predict(pairs[:CALL])
    work = WorkLog.watching(scorer.backend)
    timing = compare(lambda: scorer.score_batch(pairs, cfg), lambda: predict(pairs), repeats)
    timing |= {"pairs": len(pairs), "waste_percent": 100 * work.waste}
    yield Measurement(
        f"MetricX {name}, {len(pairs)} pairs, against one example at a time",
        timing["times_faster"],
        "times its rate",
        at_least=2.0,
        details=timing,
    )
    local_scores = scorer.score_batch(pairs, cfg).sequence_scores
    yield Measurement(
        "  largest difference of its scores (of 25)",
        largest_difference(local_scores, predict(pairs)),
        "",
    )


# -- bfloat16 ----------------------------------------------------------------------


def in_bfloat16(xcomet: Path, metricx: Path, pairs: Pairs, repeats: int) -> Iterator[Measurement]:
    """Run both comparisons with both sides in bfloat16, and measure how far scores move from
    float32.
    """
    cpu = Path("/proc/cpuinfo").read_text()
    native = "avx512_bf16" in cpu or "amx_bf16" in cpu
    if not native:
        pairs = pairs[: len(pairs) // 10]
    cfg = ScoringConfig(batch_size=len(pairs))
    emulation_note = "" if native else " (emulated: this CPU has no bfloat16)"
    half = torch.bfloat16
    for name, make, upstream, folder in (
        ("xCOMET 25 M", _local_xcomet, _upstream, xcomet),
        ("MetricX 25 M", _local_metricx, UpstreamMetricX, metricx),
    ):
        exact = make(folder).score_batch(pairs, cfg).sequence_scores
        scorer, predict = make(folder, "bfloat16"), upstream(folder, half)
        timing = compare(partial(scorer.score_batch, pairs, cfg), partial(predict, pairs), repeats)
        moved = scorer.score_batch(pairs, cfg).sequence_scores
        upstream_calls = predict(pairs)
        timing |= {
            "pairs": len(pairs),
            "native": native,
            "mean_move": statistics.fmean(abs(a - b) for a, b in zip(exact, moved, strict=True)),
            "upstream_largest_move": largest_difference(exact, upstream_calls),
        }
        yield Measurement(
            f"{name} in bfloat16{emulation_note}, against upstream's way in it",
            timing["times_faster"],
            "times its rate",
            details=timing,
        )
        yield Measurement(
            "  largest move of a score from float32", largest_difference(exact, moved), ""
        )


# -- the cache ----------------------------------------------------


def second_run_with_redis(folder: Path, pairs: Pairs, repeats: int) -> Iterator[Measurement]:
    """Run the same job twice, each time on a fresh service, so that only Redis knows the
    scores.
    """
    import redis

    cold: list[float] = []
    warm: list[float] = []
    with redis_server() as cache:
        for _ in range(repeats):
            with redis.Redis.from_url(cache) as connection:
                connection.flushall()
            first, seconds = _job(folder, cache, pairs)
            cold.append(seconds)
            second, seconds = _job(folder, cache, pairs)
            warm.append(seconds)
            assert [r.score for r in first] == [r.score for r in second], "a cached score differs"
            hits = sum(r.cached for r in second)
            assert hits == len(pairs), f"{hits} of {len(pairs)} came from the cache"
    ratio = statistics.median(cold) / statistics.median(warm)
    details = {"pairs": len(pairs), "cold_runs_s": cold, "warm_runs_s": warm}
    yield Measurement(
        "xCOMET 25 M, the same job again on a fresh service, Redis warm",
        ratio,
        "times the cold rate",
        at_least=50.0,
        details=details,
    )


def _job(folder: Path, cache: str, pairs: Pairs) -> tuple[list[Any], float]:
    results: list[Any] = []
    with service("services.xcomet", "--model", str(folder), "--threads", "1", "--cache", cache) as (
        _,
        url,
    ):
        with SyncScoringClient(url) as client:
            client.info()
            seconds = timed(lambda: results.extend(client.score(pairs)))
    return results, seconds


if __name__ == "__main__":
    run("scoring", __doc__, questions)
