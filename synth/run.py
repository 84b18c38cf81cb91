"""A call of the command: the folder, the log, the stages one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from synth.execution.stage import GlobalStage, MapStage, Stage, StageContext
from synth.execution.stage_start import check_begun, prepare_stage
from synth.export.rows import bare_url
from synth.filters import abstentions
from synth.location import create_run_dir, warnings
from synth.log import log_to
from synth.reasons import Reason, explain
from synth.report.page import write_report
from synth.report.views import write_stats, write_views
from synth.stages.table import BY_NAME, ORDER, map_stage
from synth.storage.stats import Exporter, StageStats, count_stage, unreadable
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


def run_folder(cfg: SynthConfig, options: RunOptions) -> Path:
    """Return the run's folder; a dry run has a separate one."""
    out_dir = cfg.run.out_dir
    return out_dir.with_name(out_dir.name + "-dry-run") if options.dry_run else out_dir


def stage_context(name: str, cfg: SynthConfig, options: RunOptions) -> StageContext:
    """Return the context of one stage of a call."""
    return StageContext(
        cfg,
        run_folder(cfg, options),
        fallback_dir=cfg.run.out_dir if options.dry_run else None,
        resume=options.resume,
        overwrite=options.overwrite and name == options.stages[0],
        limit=options.limit,
        shard_id=options.shard_id,
        num_shards=options.num_shards,
        share=options.num_shards == 1 or len(options.stages) > 1,
        give_up=options.give_up,
    )


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
        ctx = stage_context(name, cfg, options)
        ctx.advance, ctx.print_line = advance, console.print
        if exporter is not None:
            exporter.watch(name, ctx.stats)
        if options.repair is not None:
            repair_shard(BY_NAME[name], ctx, options)
        run_stage(name, ctx, options.engine, options.processes)
    folder = ctx.folder(name)
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


def run_stage(name: str, ctx: StageContext, engine: str = "local", processes: int = 1) -> None:
    """Run one stage: check, run, then write stats and, when all shards are done, views."""
    stage = BY_NAME[name]
    manifest = prepare_stage(stage, ORDER[ORDER.index(stage) + 1 :], ctx)
    save_config(_without_credentials(ctx.cfg), ctx.out_dir / "config.yaml")
    log.info("stage", stage=name, shard_id=ctx.shard_id, num_shards=ctx.num_shards)
    try:
        if isinstance(stage, GlobalStage):
            run_whole_stage(stage, manifest, ctx)
        elif engine == "ray":
            run_map_stage_on_ray(map_stage(name), manifest, ctx)
        else:
            run_map_stage_on_processes(map_stage(name), manifest, ctx, processes)
    finally:
        write_stats(ctx, name)
    if ctx.folder(name).done():
        write_views(ctx, name)
        stage.finish(ctx)


def run_whole_stage(stage: GlobalStage, manifest: dict[str, Any], ctx: StageContext) -> None:
    """Run a stage that needs all records, in one process; with shared work the others wait.

    Raises UserError if another process runs it, or if its input has changed."""
    folder = ctx.folder(stage.name)
    if not stage.runs_alone:
        stage.run(ctx, manifest)  # even when done, because it clears temporary parts
        stage.verify(folder)
        return
    if folder.shards() is not None:
        stage.verify(folder)
    if folder.done():
        return
    locks = [(ctx.input_of(stage).lock(), True), (folder.lock(), False)]
    with hold_locks(locks, "run it", wait=ctx.print_line if ctx.share else None):
        if not folder.done():
            check_begun(stage, manifest, ctx)
            stage.run(ctx, manifest)


def repair_shard(stage: Stage, ctx: StageContext, options: RunOptions) -> None:
    """Mark a shard to be made again; first make its input again if that was deleted.

    Raises UserError for an unknown shard."""
    previous, index = stage.after, options.repair
    assert index is not None
    if previous is not None and (ctx.folder(previous.name).mark(index) or {}).get("let_go"):
        ctx.print_line(f"{previous.name}: shard {index} was deleted, and is made again first")
        repair_ctx = replace(ctx, stats=StageStats(), advance=lambda done, total: None)
        repair_shard(previous, repair_ctx, options)
        run_stage(previous.name, repair_ctx, options.engine, options.processes)
    drop_shard(stage, ctx, index)


def drop_shard(stage: Stage, ctx: StageContext, index: int) -> None:
    """Mark a shard to be made again; for a stage that needs all records, all shards.

    Later stages stay, because the output will be identical. Raises UserError for an unknown
    shard."""
    folder = ctx.folder(stage.name)
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
