"""export: the pairs as JSONL and Parquet, with where each comes from, and a card that sums it up.

Nothing that changes from run to run of the same config goes in: no times, no retries.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scorekit.errors import UserError
from scorekit.files import put_folder
from scorekit.processes import end_worker_with_parent, usable_cpus
from synth.config import SynthConfig
from synth.drive.kinds import WholeStage
from synth.export.files import FileJob, changed_files, is_written, plan_files, write_files
from synth.folder.stats import funnel
from synth.folder.store import StageFolder, read_json
from synth.stages.cost import PACKED, Cost, Sizes
from synth.stages.score_select_best import ScoreSelectBest

if TYPE_CHECKING:
    from synth.context import Context

FOLDER = "export"
#: Where an export is made, until it is whole and takes the name.
STAGING = ".export"
_VERSIONS = ("scorekit", "torch", "transformers")
#: Bytes of an exported row's `selection`, in both formats.
_SELECTION_BYTES = 500


class Export(WholeStage):
    """Writes out_dir/export/: train.jsonl, train.parquet (or numbered files of both), pairs.* by
    option, manifest.json and README.md. The folder is that of before until the new one is whole.
    """

    name = "export"
    outputs = (FOLDER, STAGING, "report.html")
    has_shards = False

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """What the records hold beside the input. Not the teacher's URL: it may have moved."""
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
        """A row of both formats for each pair."""
        row = (run.source_bytes + run.text_bytes) * PACKED + _SELECTION_BYTES
        return Cost(
            self.name,
            records=run.chosen,
            disk_bytes=int(run.chosen * 2 * row),
            driver_s=(0.001, 0.0),
        )

    def run(self, ctx: Context, manifest: dict[str, Any]) -> None:
        """Raises UserError where the filter has not looked at every shard."""
        from synth.export.card import write_card
        from synth.folder.manifest import write_manifest

        source = ctx.input_of(self)
        if not source.done():
            raise UserError(f"{source.path}: not done; resume --stage {source.name} first")
        own = ctx.folder(self.name)
        if own.manifest() is None:
            own.set_manifest(manifest)
        staging = ctx.out_dir / STAGING
        staging.mkdir(parents=True, exist_ok=True)
        marks = self._write(ctx, source, staging, manifest)
        files = [file for mark in marks for file in mark["files"]]
        ctx.stats.records_in = ctx.stats.records_out = sum(mark["records"] for mark in marks)
        counts = funnel((stage.name for stage in self.before), ctx.out_dir, ctx.inputs)
        write_manifest(staging / "manifest.json", ctx, files, counts, manifest)
        write_card(staging / "README.md", ctx, files, counts)
        names = {file["name"] for file in files} | {"manifest.json", "README.md"}
        for path in staging.iterdir():
            if path.name not in names:
                path.unlink()
        put_folder(staging, ctx.out_dir / FOLDER)
        own.set_manifest({**manifest, "shards": len(marks)})

    def verify(self, own: StageFolder) -> None:
        """Raise UserError where a file of a finished export is not what was written; the card is
        the user's to edit."""
        folder = own.out_dir / FOLDER
        own.verify_marks()
        for index in range(own.shards() or 0):
            for name in changed_files(folder, (own.mark(index) or {})["files"]):
                raise UserError(
                    f"{folder / name}: was changed since it was written, or is gone: mend it with "
                    f"`run --stage {self.name} --repair {index}`"
                )

    def faults(self, folder: StageFolder) -> Iterator[str]:
        """The first file that is not what was written."""
        try:
            self.verify(folder)
        except UserError as error:
            yield str(error)

    def _write(
        self, ctx: Context, source: StageFolder, staging: Path, manifest: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Write all files that do not stand in the staging folder yet; the marks of all."""
        own = ctx.folder(self.name)
        plan = plan_files(source, ctx.cfg.export.rows_per_file, ctx.limit)
        metricx = scorer_versions(ctx)
        jobs = [
            FileJob(ctx.cfg, source, staging, tuple(pieces), number, len(plan), metricx)
            for number, pieces in enumerate(plan)
        ]
        todo = [job for job in jobs if not is_written(own.mark(job.number), staging)]
        ctx.advance(len(jobs) - len(todo), len(jobs))
        for number, mark in _write_all(todo, ctx.cfg.export.processes):
            own.set_mark(number, {**mark, "input": manifest["input"]})
            ctx.advance(1, None)
        return [own.mark(job.number) or {} for job in jobs]


def _write_all(jobs: list[FileJob], processes: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, mark) of each job as it is done, by several processes where there are cores."""
    at_once = min(len(jobs), processes or usable_cpus())
    if at_once < 2:
        for job in jobs:
            yield job.number, write_files(job)
        return
    others = set(multiprocessing.active_children())
    # Spawned: a forked one would share the driver's locks, and hold them when it is killed.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(at_once, mp_context=spawn, initializer=end_worker_with_parent)
    try:
        asked = {pool.submit(write_files, job): job.number for job in jobs}
        for done in as_completed(asked):
            yield asked[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()  # of no use any more: all files are done, or the export has failed
        pool.shutdown()


def scorer_versions(ctx: Context) -> dict[str, Any]:
    """What the scoring service said of itself when the candidates were scored."""
    folders = [folder for folder in (ctx.out_dir, ctx.inputs) if folder is not None]
    stages = [StageFolder(folder, ScoreSelectBest.name).service("metricx") for folder in folders]
    for path in (*stages, *(folder / "service-metricx.json" for folder in folders)):
        if (info := read_json(path, "versions")) is not None:
            return {
                "checkpoint": ctx.cfg.metricx.checkpoint,
                **{key: info.get(key) for key in ("model", "revision", "dtype", "commit")},
                "max_input_length": info.get("max_input_length"),
                "versions": {k: info["versions"].get(k) for k in _VERSIONS},
            }
    raise UserError(
        f"{ctx.out_dir}: no service-metricx.json; run --stage {ScoreSelectBest.name} first"
    )
