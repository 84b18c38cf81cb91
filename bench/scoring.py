"""What do length-sorted batches, and the way over HTTP, give and cost?

Each line compares two ways of scoring the same 1,000 pairs in the same process tree, one thread a
model, no cache; a figure is the ratio of medians of runs that alternate.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from demo.processes import running_service
from scorekit.client import SyncScoringClient
from scorekit.scorers import SampleForScoring, ScoringConfig
from services.metricx.model import MetricXQEScorer
from services.xcomet.model import XCometXLScorer

ROOT = Path(__file__).parents[1]
PAIRS = 1000
REPEATS = 5


def read_pairs() -> list[SampleForScoring]:
    """Real sources with translations: the demo's held-out and prompt sets."""
    pairs = []
    for name in ("heldout", "rl_prompts"):
        for line in (ROOT / f"demo/data/{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            pairs.append(SampleForScoring(row["src_text"], row["ref_text"]))
    return pairs[:PAIRS]


def compare(ours: Callable[[], Any], theirs: Callable[[], Any]) -> dict[str, float]:
    """Seconds (medians of alternating runs) and how many times faster ours is."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for taken, run in zip(times, (ours, theirs), strict=True):
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
    mine, other = map(statistics.median, times)
    return {"ours_s": mine, "other_s": other, "times_faster": other / mine}


def metricx_against_one_at_a_time(pairs: list[SampleForScoring]) -> dict[str, float]:
    """Upstream's predict.py scores examples one by one, in the order of the file."""
    scorer = MetricXQEScorer(str(ROOT / "demo/models/metricx"), device="cpu", threads=1)
    one = ScoringConfig(batch_size=1)
    found = compare(lambda: scorer.score_batch(pairs, ScoringConfig(batch_size=PAIRS)),
                    lambda: [scorer.score_batch([pair], one) for pair in pairs])  # fmt: skip
    batched = scorer.score_batch(pairs, ScoringConfig(batch_size=PAIRS)).sequence_scores
    single = [scorer.score_batch([pair], one).sequence_scores[0] for pair in pairs]
    return found | {"largest_difference": _largest_difference(batched, single)}


def xcomet_against_predict(pairs: list[SampleForScoring]) -> dict[str, float]:
    """unbabel-comet's own `predict`, batches of 16, sorted by source characters."""
    import comet

    folder = ROOT / "demo/models/xcomet"
    scorer = XCometXLScorer(str(folder), device="cpu", threads=1)
    theirs = load_upstream(folder, comet)
    samples = [{"src": pair.src, "mt": pair.mt} for pair in pairs]

    def predict() -> Any:
        return theirs.predict(samples, batch_size=16, gpus=0, progress_bar=False, num_workers=0)

    found = compare(lambda: scorer.score_batch(pairs, ScoringConfig(batch_size=PAIRS)), predict)
    ours = scorer.score_batch(pairs).sequence_scores
    return found | {"largest_difference": _largest_difference(ours, predict().scores)}


def load_upstream(folder: Path, comet: Any) -> Any:
    """The same checkpoint through unbabel-comet alone. Its stored encoder path is relative, which
    upstream reads from the working folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return comet.load_from_checkpoint("checkpoints/model.ckpt", local_files_only=True)
    finally:
        os.chdir(before)


def http_against_in_process(pairs: list[SampleForScoring]) -> dict[str, float]:
    """The MetricX service over HTTP in requests of 64, against the same model called directly."""
    model = str(ROOT / "demo/models/metricx")
    scorer = MetricXQEScorer(model, device="cpu", threads=1)
    cfg = ScoringConfig(batch_size=PAIRS)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service("metricx", Path(folder), "--model", model) as url,
        SyncScoringClient(url, batch_size=64) as client,
    ):
        return compare(lambda: client.score(pairs, options={"cache": False}),
                       lambda: scorer.score_batch(pairs, cfg))  # fmt: skip


def _largest_difference(ours: list[float | None], theirs: Any) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True) if a is not None)


QUESTIONS = {
    "MetricX: sorted batches against one example at a time": metricx_against_one_at_a_time,
    "xCOMET: our forward against predict(batch_size=16)": xcomet_against_predict,
    "MetricX: over HTTP against the same model in process": http_against_in_process,
}


def main() -> None:
    """Ask every question, print the table, write the JSON."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # Lightning's notes, once a call
    pairs = read_pairs()
    table = Table("question", "ours, s", "other, s", "ratio", "largest difference")
    results: dict[str, Any] = {"machine": machine(), "pairs": len(pairs), "repeats": REPEATS}
    for title, ask in QUESTIONS.items():
        found = results[title] = ask(pairs)
        difference = found.get("largest_difference")
        table.add_row(title, f"{found['ours_s']:.2f}", f"{found['other_s']:.2f}",
                      f"{found['times_faster']:.2f}",
                      "" if difference is None else f"{difference:.1e}")  # fmt: skip
    Console().print(table)
    path = ROOT / "bench/results/scoring.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(ROOT)}", file=sys.stderr)


def machine() -> str:
    """Processor and versions."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":")[1].strip()
            break
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a process"


if __name__ == "__main__":
    main()
