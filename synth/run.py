"""A call of the command: the folder, the log, the stages one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from scorekit.config import save_config
from scorekit.errors import UserError
from scorekit.locks import hold_locks
from scorekit.prompts import load_template
from scorekit.streams import lost_lines
from synth.config import SynthConfig, languages
from synth.execution.cluster import run_map_stage_on_ray
from synth.execution.processes import run_map_stage_on_processes
from synth.execution.stage import GlobalStage, MapStage, Stage, StageProgress, StageWork
from synth.execution.stage_start import check_begun, prepare_stage
from synth.export.rows import bare_url
from synth.filters import abstentions
from synth.location import create_run_dir, warnings
from synth.log import log_to
from synth.reasons import Reason, explain
from synth.report.page import write_report
from synth.report.views import write_stats, write_views
from synth.stages.table import BY_NAME, ORDER, map_stage
from synth.storage.shares import ShardShare
from synth.storage.stats import Exporter, count_stage, unreadable
from synth.storage.store import StageFolder

log = structlog.get_logger()

#: Number of the most frequent reasons that are explained after a stage.
_MAX_REASONS = 3
#: Share of accepted records with a note above which it is a warning; for some codes, a single
#: record is enough.
_MAX_NOTED_SHARE = 0.5
_WARNED_FROM: dict[str, float] = {Reason.NO_IMPROVEMENT: 0.0}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of the command besides the config."""

    stages: tuple[str, ...]
    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False
    limit: int | None = None
    shard_id: int = 0
    num_shards: int = 1
    engine: str = "local"
    processes: int = 1
    give_up: bool = False
    repair: int | None = None

    @property
    def share(self) -> ShardShare:
        """Return the share of this process: without numbers of machines, every free shard."""
        takes_all = self.num_shards == 1 or len(self.stages) > 1
        return ShardShare(self.shard_id, self.num_shards, takes_all)


def run_folder(cfg: SynthConfig, options: RunOptions) -> Path:
    """Return the run's folder; a dry run has a separate one."""
    out_dir = cfg.run.out_dir
    return out_dir.with_name(out_dir.name + "-dry-run") if options.dry_run else out_dir


def run_folders(cfg: SynthConfig, options: RunOptions) -> tuple[Path, ...]:
    """Return the folders that may have a stage's output: the run's; a dry run goes on from that of
    the run itself."""
    folder = run_folder(cfg, options)
    return (folder, cfg.run.out_dir) if options.dry_run else (folder,)


def run_stages(cfg: SynthConfig, options: RunOptions) -> None:
    """Run the stages in order. Raises UserError; KeyboardInterrupt keeps finished work."""
    out_dir = run_folder(cfg, options)
    load_template(cfg.teacher.prompt)  # before anything is spent
    create_run_dir(out_dir)
    log_to(out_dir / "logs.txt", cfg.run.log_level)
    console = Console(stderr=True, highlight=False, markup=False)
    for warning in (*warnings(cfg, out_dir), *_abstentions(cfg, options)):
        console.print(warning, soft_wrap=True)
    port = cfg.run.prometheus_port
    try:
        with closing(Exporter(port)) if port is not None else nullcontext() as exporter:
            for name in options.stages:
                if not _run_one(name, cfg, out_dir, options, console, exporter):
                    return
    except OSError as error:
        error.filename = error.filename or str(out_dir)  # the error of a full disk has no file name
        raise
    finally:
        for line in lost_lines():
            log.warning("lines_lost", of=line)
    _report_unreadable(out_dir, console)
    if StageFolder(out_dir, ORDER[-1].name).done():
        console.print(f"report: {write_report(out_dir)}", soft_wrap=True)
    console.print(f"run folder: {out_dir}", soft_wrap=True)


def _abstentions(cfg: SynthConfig, options: RunOptions) -> list[str]:
    """Return the limits of the rules for this language pair."""
    has_rules = cfg.filters.rule_based and "format_filter" in options.stages
    return [f"filters.rules: {line}" for line in abstentions(*languages(cfg))] if has_rules else []


def _report_unreadable(out_dir: Path, console: Console) -> None:
    """Report unreadable documents at the end, because no later count includes them."""
    for stage in ORDER:
        folder = StageFolder(out_dir, stage.name)
        if codes := unreadable(folder):
            counts_text = ", ".join(f"{code} {count:,}" for code, count in codes.items())
            console.print(
                f"warning: {sum(codes.values()):,} documents could not be read ({counts_text}); "
                f"the first lines: {folder.path / 'counts.json'}",
                soft_wrap=True,
            )


def _run_one(
    name: str,
    cfg: SynthConfig,
    out_dir: Path,
    options: RunOptions,
    console: Console,
    exporter: Exporter | None,
) -> bool:
    """Run one stage with its progress bar; return False if other machines are not done."""
    with _progress(console, name) as advance:
        progress = StageProgress(advance, console.print)
        if exporter is not None:
            exporter.watch(name, progress.stats)
        if options.repair is not None:
            repair_shard(BY_NAME[name], cfg, options, progress.print_line)
        run_stage(name, cfg, options, progress)
    folder = StageFolder(out_dir, name)
    counts = count_stage(folder)
    if counts is not None:
        done = "" if folder.done() else f" ({counts.done} of {counts.shards} shards)"
        console.print(
            f"{name}: {counts.records_out:,} of {counts.records_in:,} records accepted{done}",
            soft_wrap=True,
        )
        for code, count in Counter(counts.rejected).most_common(_MAX_REASONS):
            console.print(f"  {count:,} {code}: {explain(code)}", soft_wrap=True)
        for code, count in counts.told.items():
            max_noted = _WARNED_FROM.get(code, _MAX_NOTED_SHARE) * counts.records_out
            warning = "warning: " if count > max_noted else ""
            console.print(f"  {warning}{count:,} {code}: {explain(code)}", soft_wrap=True)
    if not folder.done():
        console.print(f"{name}: other machines' shards are not done")
        return False
    if counts is not None and not counts.records_out and name != options.stages[-1]:
        codes = ", ".join(f"{code} {count}" for code, count in counts.rejected.items())
        raise UserError(
            f"{name}: no record was accepted ({codes}). Fix the cause, then run with --overwrite"
        )
    return True


def run_stage(name: str, cfg: SynthConfig, options: RunOptions, progress: StageProgress) -> None:
    """Run one stage: check, run, then write stats and, when all shards are done, views."""
    stage, out_dirs = BY_NAME[name], run_folders(cfg, options)
    folder = StageFolder(out_dirs[0], name)
    work = StageWork(
        cfg,
        folder,
        out_dirs,
        limit=options.limit,
        share=options.share,
        give_up=options.give_up,
        progress=progress,
    )
    manifest = prepare_stage(
        stage,
        ORDER[ORDER.index(stage) + 1 :],
        work,
        resume=options.resume,
        overwrite=options.overwrite and name == options.stages[0],
    )
    save_config(_without_credentials(cfg), folder.out_dir / "config.yaml")
    log.info("stage", stage=name, shard_id=options.shard_id, num_shards=options.num_shards)
    try:
        if isinstance(stage, GlobalStage):
            run_whole_stage(stage, manifest, work)
        elif options.engine == "ray":
            run_map_stage_on_ray(map_stage(name), manifest, work)
        else:
            run_map_stage_on_processes(map_stage(name), manifest, work, options.processes)
    finally:
        write_stats(cfg, folder, progress.stats)
    if folder.done():
        write_views(folder, cfg.run.view_records, progress.print_line)
        stage.finish(folder, cfg, options.limit)


def run_whole_stage(stage: GlobalStage, manifest: dict[str, Any], work: StageWork) -> None:
    """Run a stage that needs all records, in one process; with shared work the others wait.

    Raises UserError if another process runs it, or if its input has changed."""
    folder = work.folder
    if not stage.runs_alone:
        stage.run(work, manifest)  # even when done, because it clears temporary parts
        stage.verify(folder)
        return
    if folder.shards() is not None:
        stage.verify(folder)
    if folder.done():
        return
    source = stage.input_of(work.out_dirs)
    locks = [(source.lock(), True), (folder.lock(), False)]
    with hold_locks(
        locks, "run it", wait=work.progress.print_line if work.share.takes_all else None
    ):
        if not folder.done():
            check_begun(folder, source, manifest)
            stage.run(work, manifest)


def repair_shard(
    stage: Stage, cfg: SynthConfig, options: RunOptions, print_line: Callable[[str], None]
) -> None:
    """Mark a shard to be made again; first make its input again if that was deleted.

    Raises UserError for an unknown shard."""
    out_dir, previous, index = run_folder(cfg, options), stage.after, options.repair
    assert index is not None
    if previous is not None:
        mark = StageFolder(out_dir, previous.name).mark(index) or {}
        if mark.get("let_go"):
            print_line(f"{previous.name}: shard {index} was deleted, and is made again first")
            repair_shard(previous, cfg, options, print_line)
            run_stage(previous.name, cfg, options, StageProgress(print_line=print_line))
    drop_shard(stage, out_dir, index)


def drop_shard(stage: Stage, out_dir: Path, index: int) -> None:
    """Mark a shard to be made again; for a stage that needs all records, all shards.

    Later stages stay, because the output will be identical. Raises UserError for an unknown
    shard."""
    folder = StageFolder(out_dir, stage.name)
    shards = folder.shards() or 0
    if index >= shards:
        raise UserError(f"--repair {index}: {folder.path} has {shards} shards")
    if isinstance(stage, MapStage):
        with hold_locks([(folder.lock(index), False)], "repair it"):
            folder.drop(index)
    else:
        with hold_locks([(folder.lock(), False)], "repair it"):
            folder.clear()


def _without_credentials(cfg: SynthConfig) -> SynthConfig:
    """Return the config without passwords, to be saved with the data."""

    def bare(urls: str | list[str]) -> str | list[str]:
        return bare_url(urls) if isinstance(urls, str) else [bare_url(url) for url in urls]

    cleaned = cfg.model_copy(deep=True)
    cleaned.teacher.base_url = bare_url(cleaned.teacher.base_url)
    cleaned.metricx.url = bare(cleaned.metricx.url)
    cleaned.filters.llm_judge.url = bare(cleaned.filters.llm_judge.url)
    return cleaned


class _Rate(ProgressColumn):
    """Column with the records per second."""

    def render(self, task: Task) -> Text:
        """Return the rate, empty until it is known."""
        return Text("" if task.speed is None else f"{task.speed:,.1f}/s")


@contextmanager
def _progress(console: Console, name: str) -> Iterator[Any]:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=not console.is_terminal,
    ) as bar:
        task = bar.add_task(name, total=None)

        def advance(done: int, total: int | None) -> None:
            if total is not None:
                bar.update(task, total=total)
            bar.advance(task, done)

        yield advance
