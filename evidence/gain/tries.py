"""Tries other rewards and more prompts for PPO, on the development set alone, one seed each.

    python -m evidence.gain.tries            # what stands in bench/results/gain/tries.json is kept
    python -m evidence.gain.tries --only log-probability

Each try changes one thing of the arm PPO of `evidence.gain`, English to Korean. All are measured by
the same metrics. One seed says where a large gain may be, and nothing about a small one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from sacrebleu.metrics.chrf import CHRF

from bench.common import ROOT, machine, markdown_table, write_json
from evidence.gain.arms import COMMON, PPO_CONFIG, Plan, Size, folder_of, make_plan, overrides
from evidence.gain.data import DIRECTIONS
from evidence.gain.runs import (
    prepare,
    processor_seconds,
    run_checked,
    start_digest,
    take_policy,
)
from evidence.seeds import PAGES, check_arms, wrapped, write_section
from scorekit.command import clean_exit
from scorekit.errors import UserError
from testing.processes import exit_on_sigterm, running_services

PAGE = PAGES / "translation.md"
BEGIN = "<!-- written by `python -m evidence.gain.tries` -->"
END = "<!-- end of what is written on the tries -->"
DIRECTION = DIRECTIONS["en-ko"]
#: The policy that knows how likely a source is, given a translation.
REVERSE = folder_of(DIRECTIONS["ko-en"]) / "start/policy"
console = Console(stderr=True, highlight=False)
_CHRF_1 = CHRF(beta=1)


@dataclass(frozen=True, slots=True)
class Try:
    """Describes one try.

    settings: its changes.
    size: of the run.
    metrics: folder of the metrics that reward it, in the folder of the tries; None: the start's.
    """

    title: str
    settings: tuple[str, ...] = ()
    size: Size = field(default_factory=Size)
    metrics: str | None = None


SCORER = "evidence.gain.log_probability:LogProbability"
TRIES = {
    "base": Try("PPO as in the table"),
    "no-spans": Try("no spans", ("reward.w_xcomet_span=0",)),
    "log-probability": Try(
        "own and reverse log-probability alone",
        ("reward.w_xcomet_seq=0", "reward.w_xcomet_span=0", f"reward.metricx_urls={SCORER}"),
    ),
    "beta-1": Try("metrics of chrF with beta 1", metrics="beta-1"),
    "many": Try("5,000 prompts, 156 updates of 32", size=Size(prompts=5000, updates=156, batch=32)),
}


def chrf_beta_1(hypothesis: str, reference: str) -> float:
    """Return sentence chrF that weighs precision as recall, 0 to 100: length cannot please it."""
    return _CHRF_1.sentence_score(hypothesis, [reference]).score


def make_beta_1(folder: Path, start: Path) -> None:
    """Train metrics of chrF with beta 1 from the same samples, unless they are there."""
    from evidence.gain.start import copy_tokenizers, make_metrics

    if not (folder / "candidates").is_dir():
        shutil.copytree(start / "candidates", folder / "candidates")
    copy_tokenizers()
    make_metrics(folder, DIRECTION, 600, None, chrf_beta_1)


def run_tries(names: Sequence[str], path: Path) -> None:
    """Run what is missing, and write all results. path: of the file of results.

    Raises UserError without a start, or if the results are of another one.
    """
    base = make_plan(development=True, direction=DIRECTION)
    check_starts(base.start, names)
    folder, start = base.folder / "tries", start_digest(base.start)
    results: dict[str, Any] = {"start": start, "tries": {}}
    if path.is_file():
        results = json.loads(path.read_text("utf-8"))
    if results["start"] != start:
        raise UserError(
            f"{path}: is of another start than {base.start}. Move it away to try all again"
        )
    missing = [name for name in ("start", *names) if name not in results["tries"]]
    if not missing:
        return
    with contextlib.ExitStack() as stack:
        urls = serve(stack, base.start, folder)
        for name in missing:
            size = Size() if name == "start" else TRIES[name].size
            plan = replace(base, folder=folder / name, size=size)
            prepare(plan)
            results["tries"][name] = run_one(stack, plan, name, urls)
            results["commit"] = machine()["commit"]
            write_json(path, results)


def check_starts(start: Path, names: Sequence[str]) -> None:
    """Raise UserError that says what to run if a policy that the tries need is not there."""
    needed = {start / "policy": "en-ko"}
    if "log-probability" in names:
        needed[REVERSE] = "ko-en"
    for policy, direction in needed.items():
        if not policy.is_dir():
            raise UserError(
                f"{policy}: no start. Make it: python -m evidence.gain.start policy --direction "
                f"{direction} (of en-ko also: metrics)"
            )


def serve(stack: contextlib.ExitStack, models: Path, logs: Path) -> dict[str, str]:
    """Serve both metrics of a folder; return their URLs."""
    logs.mkdir(parents=True, exist_ok=True)
    flags = {name: ("--model", str(models / name)) for name in ("metricx", "xcomet")}
    return stack.enter_context(running_services(logs, flags))


def run_one(
    stack: contextlib.ExitStack, plan: Plan, name: str, urls: dict[str, str]
) -> dict[str, Any]:
    """Train and measure a try. urls: of the metrics that measure."""
    from evidence.gain.measure import Measure

    policy, spent = plan.start / "policy", 0.0
    if name != "start":
        rewarding = urls
        if TRIES[name].metrics is not None:
            make_beta_1(plan.folder, plan.start)
            rewarding = serve(stack, plan.folder, plan.folder / "logs")
        run, before = plan.folder / "ppo-1", processor_seconds()
        settings = [*overrides("ppo", 1, plan, policy), *TRIES[name].settings]
        if name == "log-probability":
            paths = {"forward": str(policy), "backward": str(REVERSE)}
            settings.append(f"reward.metricx_scorer_args={json.dumps(paths)}")
        command = ["trainer", "train", "--config", str(PPO_CONFIG)]
        command += [part for setting in settings for part in ("--set", setting)]
        console.print(TRIES[name].title)
        run_checked(command, plan.folder / "ppo-1.log", rewarding)
        spent, policy = processor_seconds() - before, plan.folder / "policy"
        take_policy(run, policy)
    measure = Measure(plan, urls, COMMON)
    (stats,) = measure.policy(policy).values()
    measure.close()
    means = {key: round(sum(stats[key]) / stats["sources"], 3) for key in ("greedy", "sampled")}
    line = {"sources": stats["sources"], "processor_seconds": round(spent), **means}
    line |= {key: round(stats[key], 3) for key in ("bleu", "length", "reward")}
    console.print(f"  {line}")
    return line


#: Column of the table -> key of a result, and digits.
COLUMNS = {
    "greedy chrF": ("greedy", 2),
    "mean sample": ("sampled", 2),
    "BLEU": ("bleu", 2),
    "length": ("length", 3),
    "reward": ("reward", 3),
}


def table(results: Mapping[str, Any]) -> str:
    """Return the section of the page, in Markdown."""
    tries = results["tries"]
    start, rows = tries["start"], []
    cell: Callable[[float, int], str] = "{:.{}f}".format
    rows.append(["frozen start", *(cell(start[key], digits) for key, digits in COLUMNS.values())])
    rows[0].append("")
    for name, description in TRIES.items():
        if name in tries:
            line = tries[name]
            cells = [f"{line[key] - start[key]:+.{digits}f}" for key, digits in COLUMNS.values()]
            rows.append([description.title, *cells, str(line["processor_seconds"])])
    spent = sum(line["processor_seconds"] for line in tries.values()) / 3600
    head = wrapped(
        f"Each row changes one thing of *PPO*, with one seed: {start['sources']} sources of the "
        f"development set, change from the start. No test set was read. {spent:.2f} core-hours. "
        f"Commit `{results['commit']}`."
    )
    return "\n\n".join([head, markdown_table(["", *COLUMNS, "processor s"], rows)])


def main(
    only: Annotated[list[str] | None, typer.Option(help="This try; may be given again.")] = None,
    report: Annotated[bool, typer.Option(help="Only write the table, from the results.")] = False,
) -> None:
    """Run what is missing, and write the table."""
    exit_on_sigterm()
    with clean_exit(stdout="log"):
        check_arms(only or [], TRIES)
        path = ROOT / "bench/results/gain/tries.json"
        if not report:
            run_tries([name for name in TRIES if not only or name in only], path)
        if not path.is_file():
            raise UserError(f"{path}: has no result yet. Run this without --report first")
        text = table(json.loads(path.read_text(encoding="utf-8")))
        Console(width=160).print(Markdown(text))
        write_section("What else was tried", BEGIN, END, text, PAGE)


if __name__ == "__main__":
    typer.run(main)
