"""Measure how fast a corpus is sampled, and whether memory stays constant.

The corpus is the Korean side of demo/data/pydocs.jsonl, every line of every copy made different by
its number. Rates are per second of processor time of one core.

    python -m bench.sampling [--quick]
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import WORK, Measurement, in_own_process, run
from demo.madlad_shard import documents, write_shard
from synth.config import BucketingConfig, SynthConfig
from synth.execution.stage import StageWork
from synth.execution.stage_start import prepare_stage
from synth.record import source_id
from synth.sources.measure import make_measure
from synth.sources.sampling import BottomK, bucket_of, plan_quotas, prioritise
from synth.stages.sample_sources import SampleSources
from synth.storage.store import StageFolder

FOLDER = WORK / "sampling"


@dataclass(frozen=True, slots=True)
class Sizes:
    """small, large: copies of the text in the corpora;
    pool: sources that are wanted.
    """

    small: int = 17
    large: int = 340
    pool: int = 20_000


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sizes = Sizes(2, 4, 500) if quick else Sizes()
    shutil.rmtree(FOLDER, ignore_errors=True)
    yield from sampling_step(sizes)
    results = [whole_stage(copies, sizes.pool) for copies in (sizes.small, sizes.large)]
    shutil.rmtree(FOLDER, ignore_errors=True)
    for result in results:
        yield Measurement(
            f"sample_sources, {result['pieces']:,} segments and blobs, pool of {sizes.pool:,}",
            result["pieces"] / result["cpu_s"],
            "segments/s a core",
            details=result,
        )
    small, large = results
    yield Measurement("  peak memory of the smaller corpus", small["peak_mib"], "MiB")
    yield Measurement("  peak memory of the larger corpus", large["peak_mib"], "MiB")
    yield Measurement(
        f"  memory at {large['pieces'] / small['pieces']:.0f} times the segments",
        large["peak_mib"] / small["peak_mib"],
        "times that of the smaller",
        at_most=1.2,
    )


def sampling_step(sizes: Sizes) -> Iterator[Measurement]:
    """Measure naming, hashing and offering segments that are cut and measured already."""
    lines = [line for text in documents("ko") for line in text.split("\n") if line]
    edges = BucketingConfig().boundaries
    lengths = make_measure(BucketingConfig(), "ko")(lines)
    cfg = _config(Path("."), sizes.pool, [])
    sample = BottomK(plan_quotas(cfg.bucketing, cfg.final_generation.blob, sizes.pool))
    priority = prioritise(1)
    number, seconds = 0, 0.0
    for copy in range(sizes.large // 2):
        texts = [f"{line} ({copy})" for line in lines]
        started = time.process_time()
        for text, length in zip(texts, lengths, strict=True):
            sample.offer(bucket_of(length, edges) or 0, priority(source_id(text)))
        seconds += time.process_time() - started
        number += len(texts)
    yield Measurement(
        "sampling step: name, hash, bucket, offer",
        number / seconds,
        "segments/s a core",
        at_least=100_000,
        details={"segments": number, "cpu_s": seconds},
    )


def whole_stage(copies: int, pool: int) -> dict[str, Any]:
    """Run the stage from files to shards and Parquet, in a separate process."""
    corpus = FOLDER / f"corpus-{copies}"
    texts = documents("ko")
    for start in range(0, copies, 10):
        varied = [
            "\n".join(line and f"{line} ({copy})" for line in text.split("\n"))
            for copy in range(start, min(start + 10, copies))
            for text in texts
        ]
        write_shard(corpus, varied, lang="ko", index=start // 10)
    return in_own_process(_run_stage, copies, pool)


def _run_stage(copies: int, pool: int) -> dict[str, Any]:
    out = FOLDER / f"out-{copies}"
    cfg = _config(out, pool, [str(FOLDER / f"corpus-{copies}/data/ko/*.gz")])
    stage = SampleSources()
    work = StageWork(cfg, StageFolder(out, stage.name), (out,))
    wall, cpu = time.perf_counter(), time.process_time()
    stage.run(work, prepare_stage(stage, [], work))
    return {
        "pieces": work.progress.stats.records_in,
        "sampled": work.progress.stats.records_out,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    """Return the peak memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _config(out: Path, pool: int, files: list[str]) -> SynthConfig:
    data = {"src_lang": "ko", "tgt_lang": "en", "sample_pool_size": pool, "files": files}
    return SynthConfig.model_validate({"run": {"out_dir": str(out)}, "data": data})


if __name__ == "__main__":
    run("sampling", __doc__, questions)
