"""Compare torch's products of float32 matrices on a CPU with oneDNN's packed ones.

First the products alone, then the services' models (25 million parameters outside their embeddings,
bench/checkpoints.py), one thread each. Both ways run in turn, and a figure is the ratio of the
medians of their processor seconds, so other work on the machine counts little. Upstream's own way
is the judge of the scores. `SCOREKIT_MATMUL=onednn python -m bench.scoring` measures its rate.

    python -m bench.products [--quick]
"""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from bench import checkpoints
from bench.common import Measurement, largest_difference, run, timed
from bench.oracle.predict import Upstream
from bench.scoring import CALL, UpstreamMetricX
from scorekit.matmul import multiply, pack
from scorekit.scorers import SampleForScoring, ScoringConfig
from testing.pairs import read_pairs

Pairs = list[SampleForScoring]
MATMULS = ("onednn", "torch")
#: Rows, inputs and outputs.
SHAPES = (
    (1, 256, 1024),
    (1, 1024, 1024),
    (2, 1024, 1024),
    (8, 256, 1024),
    (16, 256, 1024),
    (64, 512, 2048),
    (256, 512, 512),
    (1024, 512, 2048),
    (1024, 1024, 4096),
)


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    for shape in SHAPES[:3] if quick else SHAPES:
        yield one_product(shape, 0.05 if quick else 0.5)
    pairs, repeats = read_pairs(16 if quick else 80), 1 if quick else 5
    yield from models(
        "xCOMET", 1e-5, _xcomet, Upstream(str(checkpoints.xcomet()), "float32"), pairs, repeats
    )
    upstream_metricx = UpstreamMetricX(checkpoints.metricx())
    yield from models("MetricX", 1e-4, _metricx, upstream_metricx, pairs, repeats)


def one_product(shape: tuple[int, int, int], seconds: float) -> Measurement:
    """Measure a product of a batch with one weight, both ways in turn."""
    from torch.nn.functional import linear

    rows, inputs, outputs = shape
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    packed = pack(weight)
    exact = linear(x.double(), weight.double(), bias.double())
    with torch.inference_mode():
        sides: dict[str, Callable[[], torch.Tensor]] = {
            "onednn": lambda: multiply(x, packed, bias),
            "torch": lambda: linear(x, weight, bias),
        }
        errors = {name: float((side() - exact).abs().max()) for name, side in sides.items()}
        once = timed(sides["torch"])
        count = max(1, min(200, int(seconds / 20 / max(once, 1e-6))))
        times = in_turn({n: _times(side, count) for n, side in sides.items()}, 9)
    medians = {name: statistics.median(values) / count for name, values in times.items()}
    return Measurement(
        f"{rows} x {inputs} x {outputs}, packed",
        medians["torch"] / medians["onednn"],
        "times torch's rate",
        details={"seconds": medians, "largest_errors": errors},
    )


def models(
    name: str,
    tolerance: float,
    make: Callable[[str], Any],
    upstream: Callable[[Pairs], Sequence[float]],
    pairs: Pairs,
    repeats: int,
) -> Iterator[Measurement]:
    """Measure a model with each way: all pairs in one call, calls of 8, and one pair alone."""
    scorers = {matmul: make(matmul) for matmul in MATMULS}
    calls = [pairs[start : start + CALL] for start in range(0, len(pairs), CALL)]
    parts = {
        f"{len(pairs)} pairs in one call": [pairs],
        f"calls of {CALL}, one after another": calls,
        "one pair alone": [[pair] for pair in pairs[:10]],
    }
    cfg = ScoringConfig(batch_size=len(pairs))
    for title, requests in parts.items():

        def score(scorer: Any, requests: list[Pairs] = requests) -> list[float]:
            return [s for part in requests for s in scorer.score_batch(part, cfg).sequence_scores]

        expected = [s for part in requests for s in upstream(part)]
        differences = {n: largest_difference(score(s), expected) for n, s in scorers.items()}
        sides = {matmul: partial(score, scorer) for matmul, scorer in scorers.items()}
        times = in_turn(sides, repeats)
        yield Measurement(
            f"{name} 25 M, {title}: onednn against torch",
            statistics.median(times["torch"]) / statistics.median(times["onednn"]),
            "times its rate",
            details={"runs_s": times, "largest_differences": differences},
        )
        yield Measurement(
            "  largest difference of onednn's scores from upstream's",
            differences["onednn"],
            "",
            at_most=tolerance,
        )


def in_turn(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the processor seconds of each side's runs, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            begin = time.process_time()
            side()
            times[name].append(time.process_time() - begin)
    return times


def _times(side: Callable[[], Any], count: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(count):
            side()

    return repeat


def _xcomet(matmul: str) -> Any:
    from services.xcomet.model import XCometXLScorer

    return XCometXLScorer(str(checkpoints.xcomet()), device="cpu", threads=1, matmul=matmul)


def _metricx(matmul: str) -> Any:
    from services.metricx.model import MetricXQEScorer

    return MetricXQEScorer(str(checkpoints.metricx()), device="cpu", threads=1, matmul=matmul)


if __name__ == "__main__":
    run("products", __doc__, questions)
