"""Run a curation step: read its inputs, ask its models, decide, and write its folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import typer

from scorekit.command import clean_exit
from scorekit.config import Config, load_config
from scorekit.net.loops import gather_or_cancel
from scorekit.paid.account import STORED_ARE_FREE, format_totals, planned_charges, sum_charges
from scorekit.paid.store import open_store
from trainer.search.answer.config import SEARCH
from trainer.search.records import Trajectory
from trainer.search.steps.asking import Asking, answers_location, servers
from trainer.search.steps.config import CurationConfig
from trainer.search.steps.episodes import (
    CuratedPrompt,
    CuratedRun,
    EpisodeSummary,
    read_prompts,
)
from trainer.search.steps.options import CurationOptions
from trainer.search.steps.output import check_out, write_outcome
from trainer.search.steps.prior import only_kept, read_prior
from trainer.search.steps.step import Step, Work, WorkItem
from trainer.search.steps.table import step as step_of

log = logging.getLogger(__name__)


def run_step(name: str, options: CurationOptions) -> None:
    """Run a step with the options of its command, and print its counts.

    With `--estimate`, print the most that it asks for, and write nothing.
    """
    from trainer.runs.messages import show_messages

    step: Step[Any] = step_of(name)
    with clean_exit(stdout="result" if options.estimate else "log"):
        show_messages()
        cfg = load_config(CurationConfig, options.config, list(options.set_ or []))
        if not options.estimate:
            check_out(options.out, overwrite=options.overwrite, inputs=options.inputs)
        work = open_work(step, options, cfg)
        items = step.plan(work)
        if options.estimate:
            typer.echo("\n".join(estimate_lines(step, items, work)))
            return
        with step.resources(work) as work.resources:
            outcome = step.decide(work, ask_items(step, items, work))
            write_outcome(options.out, step, work, outcome)
        counts = outcome.manifest()["counts"]
        for reason, count in counts["reasons"].items():
            typer.echo(f"{count:7}  {reason}")
        rows = options.out / "rows.jsonl"
        typer.echo(f"kept: {counts['kept']} of {counts['rows']} rows in {rows}")
        typer.echo(f"page: {options.out / 'report.html'}")
        for line in step.lines(work, outcome):
            typer.echo(line)


def open_work(step: Step[Any], options: CurationOptions, cfg: CurationConfig) -> Work[Any]:
    """Read the inputs of a step: episodes with its notes, servers, and earlier decisions."""
    settings: Config = getattr(cfg, step.name)
    notes: dict[str, Any] = {}

    def visit(trajectory: Trajectory, sample: EpisodeSummary) -> None:
        if (note := step.note(trajectory, sample, settings)) is not None:
            notes[sample.ref] = note

    ids: set[str] | None = None
    prompts: list[CuratedPrompt] = []
    runs: list[CuratedRun] = []
    answering, retriever = cfg.answering, cfg.retriever
    if {"run", "some_runs"} & set(step.options):
        prompts, runs = read_prompts(options.runs, cfg, visit)
        ids = {prompt.question.id for prompt in prompts}
    if "generator" in step.asks:
        answering, retriever = servers(options.runs, cfg)
    prior = read_prior(ids, options)
    prompts, prior = only_kept(prompts, options.rows, prior)
    return Work(options, cfg, settings, prompts, runs, notes, prior, answering, retriever)


def ask_items(step: Step[Any], items: Sequence[WorkItem], work: Work[Any]) -> dict[str, Any]:
    """Ask about all items concurrently; return their answers by key, in the order of the items.

    Raises UserError if a service is unavailable, BudgetExceeded; paid answers stay stored.
    """
    if not items:
        return {}
    # The step and its folder are the name of its usage in the file.
    name = f"{step.name} {work.options.out.absolute()}"
    location = answers_location(work.cfg, work.options.out)
    return asyncio.run(_ask_items(step, items, work, location, name))


async def _ask_items(
    step: Step[Any], items: Sequence[WorkItem], work: Work[Any], location: str, name: str
) -> dict[str, Any]:
    num_done = 0
    store = open_store(location, SEARCH, name)
    try:
        asking = Asking(step.models(work), store)
        semaphore = asyncio.Semaphore(asking.max_items)

        async def answer(item: WorkItem) -> Any:
            nonlocal num_done
            async with semaphore:
                result = await step.ask(item, asking, work)
            num_done += 1
            if num_done % max(1, len(items) // 10) == 0:
                totals = format_totals(asking.account.totals)
                log.info("asked about %d of %d; %s", num_done, len(items), totals)
            return result

        try:
            await asking.check()
            answers = await gather_or_cancel(answer(item) for item in items)
        finally:
            await asking.close()
    finally:
        await store.close()
    return {item.key: result for item, result in zip(items, answers, strict=True)}


def estimate_lines(step: Step[Any], items: Sequence[WorkItem], work: Work[Any]) -> list[str]:
    """Return lines about the max calls, tokens and cost, without a call.

    Stored answers cost nothing.
    """
    models = step.models(work)
    prices = {name: price for name, (_, price) in models.chats.items()}
    if models.answering is not None:
        money = models.answering.money
        prices |= {"generator": money.generator, "judge": money.judge}
    calls = {
        name: [usage for item in items for usage in item.calls.get(name, ())] for name in step.asks
    }
    charges = planned_charges(calls, prices)
    total = sum_charges(charges.values()).money
    lines = [*step.estimate_head(items), f"at most: {format_totals(charges)}"]
    lines += [] if total is None else [f"in all: at most {total:.2f}"]
    return [*lines, STORED_ARE_FREE]
