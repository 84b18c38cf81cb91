"""export: write the pairs with their provenance as JSONL and Parquet, and a card.

The output contains nothing that differs between runs of one config: no times, no retries.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.files import put_folder, write_atomic
from scorekit.processes import end_worker_with_parent, usable_cpus
from synth.config import SynthConfig
from synth.cost import PACKED, Cost, Sizes
from synth.execution.stage import GlobalStage, StageWork
from synth.export.card import card
from synth.export.files import FOLDER, FileJob, changed_files, is_written, plan_files, write_files
from synth.export.manifest import corpus, write_manifest
from synth.stages.score_select_best import ScoreSelectBest
from synth.storage.stats import funnel
from synth.storage.store import StageFolder, read_json

#: Folder of an export until it is complete and renamed.
STAGING = ".export"
_VERSIONS = ("scorekit", "torch", "transformers")
#: Bytes of an exported row's `selection`, in both formats.
_SELECTION_BYTES = 500


class Export(GlobalStage):
    """Writes out_dir/export/: train.jsonl, train.parquet (or numbered files of both), pairs.* by
    option, manifest.json and README.md. The old folder stays until the new one is complete.
    """

    name = FOLDER
    outputs = (FOLDER, STAGING, "report.html")
    has_shards = False

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return the settings stored in the records. The teacher's URL is excluded: it may
        change."""
        return {
            **cfg.export.model_dump(mode="json", exclude={"processes"}),
            "src_lang": cfg.data.src_lang,
            "tgt_lang": cfg.data.tgt_lang,
            "num_candidates": cfg.final_generation.num_candidates,
            "teacher": cfg.teacher.model_dump(mode="json", include={"model", "generation"}),
            "checkpoint": cfg.metricx.checkpoint,
            "seed": cfg.run.seed,
        }

    def cost(self, run: Sizes) -> Cost:
        """Return the cost of a row in both formats for each pair."""
        row = (run.source_bytes + run.text_bytes) * PACKED + _SELECTION_BYTES
        return Cost(
            self.name,
            records=run.chosen,
            disk_bytes=int(run.chosen * 2 * row),
            driver_s=(0.001, 0.0),
        )

    def run(self, work: StageWork, manifest: dict[str, Any]) -> None:
        """Write the export. Raises UserError if the filter has not finished all shards."""
        cfg, source, stage_folder = work.cfg, self.input_of(work.out_dirs), work.folder
        if not source.done():
            raise UserError(f"{source.path}: not done; resume --stage {source.name} first")
        if stage_folder.manifest() is None:
            stage_folder.set_manifest(manifest)
        out_dir = stage_folder.out_dir
        staging = out_dir / STAGING
        staging.mkdir(parents=True, exist_ok=True)
        marks = self._write(work, source, staging, manifest)
        files = [file for mark in marks for file in mark["files"]]
        stats = work.progress.stats
        stats.records_in = stats.records_out = sum(mark["records"] for mark in marks)
        counts = funnel((stage.name for stage in self.previous_stages), *work.out_dirs)
        write_manifest(
            staging / "manifest.json",
            cfg,
            work.out_dirs,
            files,
            counts,
            manifest["digest"],
            work.limit,
        )
        corpus_counts = corpus(work.out_dirs, counts[0].stage)
        write_atomic(staging / "README.md", card(cfg, counts, files, corpus_counts))
        names = {file["name"] for file in files} | {"manifest.json", "README.md"}
        for path in staging.iterdir():
            if path.name not in names:
                path.unlink()
        put_folder(staging, out_dir / FOLDER)
        stage_folder.set_manifest({**manifest, "shards": len(marks)})

    def verify(self, stage_folder: StageFolder) -> None:
        """Raise UserError if a file of a finished export has changed, except the card."""
        folder = stage_folder.out_dir / FOLDER
        stage_folder.verify_marks()
        for index in range(stage_folder.shards() or 0):
            for name in changed_files(folder, (stage_folder.mark(index) or {})["files"]):
                raise UserError(
                    f"{folder / name}: has changed since it was written, or is missing. Repair it "
                    f"with `run --stage {self.name} --repair {index}`"
                )

    def errors(self, folder: StageFolder) -> Iterator[str]:
        """Yield the error of the first changed file."""
        try:
            self.verify(folder)
        except UserError as error:
            yield str(error)

    def _write(
        self, work: StageWork, source: StageFolder, staging: Path, manifest: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Write all files that are missing in the staging folder; return all marks."""
        cfg, stage_folder, advance = work.cfg, work.folder, work.progress.advance
        plan = plan_files(source, cfg.export.rows_per_file, work.limit)
        metricx = scorer_versions(cfg, work.out_dirs)
        jobs = [
            FileJob(cfg, source, staging, tuple(slices), number, len(plan), metricx)
            for number, slices in enumerate(plan)
        ]
        todo = [job for job in jobs if not is_written(stage_folder.mark(job.number), staging)]
        advance(len(jobs) - len(todo), len(jobs))
        for number, mark in _write_all(todo, cfg.export.processes):
            stage_folder.set_mark(number, {**mark, "input": manifest["input"]})
            advance(1, None)
        return [stage_folder.mark(job.number) or {} for job in jobs]


def _write_all(jobs: list[FileJob], processes: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, mark) of each finished job; several processes write in parallel."""
    at_once = min(len(jobs), processes or usable_cpus())
    if at_once < 2:
        for job in jobs:
            yield job.number, write_files(job)
        return
    other_children = set(multiprocessing.active_children())
    # Spawned, because forked processes would share the driver's locks and keep them after a kill.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(at_once, mp_context=spawn, initializer=end_worker_with_parent)
    try:
        number_by_future = {pool.submit(write_files, job): job.number for job in jobs}
        for done in as_completed(number_by_future):
            yield number_by_future[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - other_children:
            child.terminate()  # no longer needed: all files are done, or the export has failed
        pool.shutdown()


def scorer_versions(cfg: SynthConfig, out_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return the info of the scoring service that scored the candidates.

    out_dirs: folders that may have their output.
    """
    stages = [StageFolder(path, ScoreSelectBest.name).service("metricx") for path in out_dirs]
    for path in (*stages, *(folder / "service-metricx.json" for folder in out_dirs)):
        if (info := read_json(path, "versions")) is not None:
            return {
                "checkpoint": cfg.metricx.checkpoint,
                **{key: info.get(key) for key in ("model", "revision", "dtype", "commit")},
                "max_input_length": info.get("max_input_length"),
                "versions": {k: info["versions"].get(k) for k in _VERSIONS},
            }
    raise UserError(
        f"{out_dirs[0]}: no service-metricx.json; run --stage {ScoreSelectBest.name} first"
    )
