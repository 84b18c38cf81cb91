"""A call of the command: the folder, the log, the stages one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from scorekit.prompts import load_template
from synth.config import SynthConfig, languages
from synth.context import Context, Stage
from synth.drive.kinds import MapStage, WholeStage
from synth.drive.processes import run_map_stage_on_processes
from synth.export.rows import bare_url
from synth.filters import abstentions
from synth.folder.begin import begin, check_begun
from synth.folder.locks import held
from synth.folder.places import claim, warnings
from synth.folder.stats import Exporter, StageStats, count_stage, unreadable
from synth.folder.store import StageFolder
from synth.folder.totals import write_stats
from synth.folder.views import write_views
from synth.log import log_to
from synth.report.page import write_report
from synth.report.reasons import explain
from synth.stages.table import BY_NAME, ORDER, map_stage

log = structlog.get_logger()

#: Reasons that are explained after a stage: the most frequent.
_REASONS_TOLD = 3
#: Share of the records that go on with something to be told, above which it is a warning; of some
#: codes a single record is one.
_MOST_TOLD = 0.5
_WARNED_FROM = {"no_improvement": 0.0}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command was told beside the config."""

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
    """Where the run stands; a dry run has a folder of its own."""
    out_dir = cfg.run.out_dir
    return out_dir.with_name(out_dir.name + "-dry-run") if options.dry_run else out_dir


def run_stages(cfg: SynthConfig, options: RunOptions) -> None:
    """Run the stages in their order. Raises UserError; KeyboardInterrupt leaves what is done."""
    out_dir = run_folder(cfg, options)
    load_template(cfg.teacher.prompt)  # before anything is spent
    claim(out_dir)
    log_to(out_dir / "logs.txt", cfg.run.log_level)
    console = Console(stderr=True, highlight=False, markup=False)
    for warning in (*warnings(cfg, out_dir), *_abstentions(cfg, options)):
        console.print(warning, soft_wrap=True)
    port = cfg.run.prometheus_port
    try:
        with _exporter(port) if port is not None else nullcontext() as exporter:
            for name in options.stages:
                if not _run_one(name, cfg, out_dir, options, console, exporter):
                    return
    except OSError as error:
        error.filename = error.filename or str(out_dir)  # a full disk names no file
        raise
    _tell_unreadable(out_dir, console)
    if StageFolder(out_dir, ORDER[-1].name).done():
        console.print(f"report: {write_report(out_dir)}", soft_wrap=True)
    console.print(f"run folder: {out_dir}", soft_wrap=True)


def _abstentions(cfg: SynthConfig, options: RunOptions) -> list[str]:
    """What the rules of this run cannot see."""
    asked = cfg.filters.rule_based and "format_filter" in options.stages
    return [f"filters.rules: {line}" for line in abstentions(*languages(cfg))] if asked else []


def _tell_unreadable(out_dir: Path, console: Console) -> None:
    """At the end, of every stage: what is missing from the corpus shows in no later count."""
    for stage in ORDER:
        folder = StageFolder(out_dir, stage.name)
        if codes := unreadable(folder):
            told = ", ".join(f"{code} {count:,}" for code, count in codes.items())
            console.print(
                f"warning: {sum(codes.values()):,} documents could not be read ({told}); "
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
    """One stage with its progress bar; False where the work of other machines is not done."""
    with _progress(console, name) as advance:
        ctx = Context(
            cfg,
            out_dir,
            inputs=cfg.run.out_dir if options.dry_run else None,
            resume=options.resume,
            overwrite=options.overwrite and name == options.stages[0],
            limit=options.limit,
            shard_id=options.shard_id,
            num_shards=options.num_shards,
            share=options.num_shards == 1 or len(options.stages) > 1,
            give_up=options.give_up,
            advance=advance,
            tell=console.print,
        )
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
            f"{name}: {counts.records_out:,} of {counts.records_in:,} records go on{done}",
            soft_wrap=True,
        )
        for code, count in Counter(counts.rejected).most_common(_REASONS_TOLD):
            console.print(f"  {count:,} {code}: {explain(code)}", soft_wrap=True)
        for code, count in counts.told.items():
            most = _WARNED_FROM.get(code, _MOST_TOLD) * counts.records_out
            warning = "warning: " if count > most else ""
            console.print(f"  {warning}{count:,} {code}: {explain(code)}", soft_wrap=True)
    if not folder.done():
        console.print(f"{name}: other machines' shards are not done")
        return False
    if counts is not None and not counts.records_out and name != options.stages[-1]:
        codes = ", ".join(f"{code} {count}" for code, count in counts.rejected.items())
        raise UserError(f"{name}: no record goes on ({codes}): mend that, then --overwrite")
    return True


def run_stage(name: str, ctx: Context, engine: str = "local", processes: int = 1) -> None:
    """One stage: check, run, then stats and merged views when all of its shards are done."""
    stage = BY_NAME[name]
    manifest = begin(stage, ORDER[ORDER.index(stage) + 1 :], ctx)
    save_config(_without_credentials(ctx.cfg), ctx.out_dir / "config.yaml")
    log.info("stage", stage=name, shard_id=ctx.shard_id, num_shards=ctx.num_shards)
    try:
        if isinstance(stage, WholeStage):
            run_whole_stage(stage, manifest, ctx)
        elif engine == "ray":
            from synth.drive.cluster import run_map_stage_on_ray

            run_map_stage_on_ray(map_stage(name), manifest, ctx)
        else:
            run_map_stage_on_processes(map_stage(name), manifest, ctx, processes)
    finally:
        write_stats(ctx, name)
    if ctx.folder(name).done():
        write_views(ctx, name)
        stage.finish(ctx)


def run_whole_stage(stage: WholeStage, manifest: dict[str, Any], ctx: Context) -> None:
    """A stage that sees all records: one process runs it, and where work is shared the others
    wait. Raises UserError where another process is at it, or its input is not what it was."""
    folder = ctx.folder(stage.name)
    if not stage.runs_alone:
        stage.run(ctx, manifest)  # also when it is done: it has parts to clear away
        stage.verify(folder)
        return
    if folder.shards() is not None:
        stage.verify(folder)
    if folder.done():
        return
    locks = [(ctx.input_of(stage).lock(), True), (folder.lock(), False)]
    with held(locks, "run it", wait=ctx.tell if ctx.share else None):
        if not folder.done():
            check_begun(stage, manifest, ctx)
            stage.run(ctx, manifest)


def repair_shard(stage: Stage, ctx: Context, options: RunOptions) -> None:
    """Let a shard be made again; first the one that it is made of, where that was let go. Raises
    UserError for a shard that is not there."""
    before, index = stage.after, options.repair
    assert index is not None
    if before is not None and (ctx.folder(before.name).mark(index) or {}).get("let_go"):
        ctx.tell(f"{before.name}: shard {index} was let go, and is made again first")
        again = replace(ctx, stats=StageStats(), advance=lambda done, total: None)
        repair_shard(before, again, options)
        run_stage(before.name, again, options.engine, options.processes)
    drop_shard(stage, ctx, index)


def drop_shard(stage: Stage, ctx: Context, index: int) -> None:
    """Let a shard be made again; of a stage that sees all records, all of them. Later stages stay:
    the same bytes come out. Raises UserError for a shard that is not there."""
    folder = ctx.folder(stage.name)
    shards = folder.shards() or 0
    if index >= shards:
        raise UserError(f"--repair {index}: {folder.path} has {shards} shards")
    if isinstance(stage, MapStage):
        with held([(folder.lock(index), False)], "repair it"):
            folder.drop(index)
    else:
        with held([(folder.lock(), False)], "repair it"):
            folder.clear()


def _without_credentials(cfg: SynthConfig) -> SynthConfig:
    """As it may be kept beside the data."""

    def bare(urls: str | list[str]) -> str | list[str]:
        return bare_url(urls) if isinstance(urls, str) else [bare_url(url) for url in urls]

    kept = cfg.model_copy(deep=True)
    kept.teacher.base_url = bare_url(kept.teacher.base_url)
    kept.metricx.url = bare(kept.metricx.url)
    kept.filters.llm_judge.url = bare(kept.filters.llm_judge.url)
    return kept


@contextmanager
def _exporter(port: int) -> Iterator[Exporter]:
    exporter = Exporter(port)
    try:
        yield exporter
    finally:
        exporter.close()


class _Rate(ProgressColumn):
    """Records a second."""

    def render(self, task: Task) -> Text:
        """The rate, once there is one."""
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
