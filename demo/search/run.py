"""The search demo: index PDFs, show one question step by step, and train a searcher."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo.common import ROOT, TRAINER_THREADS, console, print_step, run_checked, set_flags
from demo.search.compare import read_stage, show_episode, show_stats, show_types, verdict
from demo.search.generator import NAME as GENERATOR
from demo.search.generator import create_app
from demo.search.policy import NAME as SEARCHER
from demo.search.policy import searcher
from testing.processes import exit_on_sigterm, running_services, serving

HERE = Path(__file__).parent
CONFIG = ROOT / "configs/search/demo.yaml"
PHASE1, PHASE2 = ROOT / "configs/search/demo_phase1.yaml", ROOT / "configs/search/demo_phase2.yaml"
QUESTION = "How much did the economy of Iran produce per person in 1952?"
REFERENCE, GOLD = "3,035 dollars", "income-per-head_4"


def run_demo(run_dir: Path, *, updates: int | None = None, limit: int | None = None) -> None:
    """Run the demo. Raise UserError if a part of it cannot run.

    updates: of each phase.
    limit: of the held-out questions.
    """
    started = time.monotonic()
    exit_on_sigterm()
    run_dir.mkdir(parents=True, exist_ok=True)
    print_step("1", "From a folder of PDFs to an index")
    ingest(run_dir / "index", HERE / "corpus")
    print_step("2", "Serving the index, a judge, a generator and a searcher without weights")
    with open_services(run_dir) as (settings, policy):
        console.print(f"   logs in {run_dir}/")
        print_step("3", "One question, turn by turn, by the searcher without weights")
        question_flags = ["--question", QUESTION, "--reference", REFERENCE, "--gold", GOLD]
        ask_dir = run_dir / "ask" / time.strftime("%Y%m%d-%H%M%S")
        trainer("ask", *policy, *settings, *question_flags, "--out", str(ask_dir))
        # Without --config and its file
        services = [*settings[2:], *set_flags({"misc.threads": TRAINER_THREADS})]
        shorter = set_flags({"rl.num_updates": updates, "eval.eval_limit": limit})
        print_step(
            "4", "A small policy as it comes, on questions about documents that are in no training"
        )
        flags = [*services, *shorter, *set_flags({"misc.run_dir": run_dir / "start"})]
        run_checked("trainer", "evaluate", "--config", str(PHASE2), *flags, "--overwrite")
        print_step("5", "Phase 1: form and NDCG")
        unseen = set_flags({"data.eval": "null"})  # phase 2 begins with what it would end with
        train_phase("phase1", PHASE1, run_dir, [*services, *shorter, *unseen])
        print_step("6", "Phase 2: the judge's score and NDCG, from what phase 1 left")
        left = set_flags({"policy.path": export(run_dir)})
        train_phase("phase2", PHASE2, run_dir, [*services, *shorter, *left])
    print_step("7", "What was learned, and what was not")
    show(run_dir)
    console.print(f"\nThe whole demo took {time.monotonic() - started:.0f} s.")


def train_phase(name: str, config: Path, run_dir: Path, settings: list[str]) -> None:
    """Train a phase, as a user would start it."""
    run_dir_flags = set_flags({"misc.run_dir": run_dir / name, "misc.overwrite": "true"})
    run_checked("trainer", "train", "--config", str(config), *settings, *run_dir_flags)


def export(run_dir: Path) -> Path:
    """Export the policy of phase 1 as a plain model folder."""
    to = run_dir / "phase1-policy"
    if to.exists():
        shutil.rmtree(to)
    run_checked("trainer", "export", str(run_dir / "phase1"), "--to", str(to))
    return to


def show(run_dir: Path) -> None:
    """Print tables, an episode, and what they mean."""
    stages = [
        read_stage("as it comes", run_dir / "start"),
        read_stage("after phase 1", run_dir / "phase2", first=True),
        read_stage("after phase 2", run_dir / "phase2"),
    ]
    show_stats(console, stages)
    show_types(console, stages)
    console.print("An episode of the last evaluation:")
    show_episode(console, stages[-1])
    for sentence in verdict(stages):
        console.print(f"   {sentence}")
    console.print(f"\n[bold]episodes[/]  {run_dir / 'phase2/view.html'}", soft_wrap=True)


def ingest(index: Path, *corpora: Path) -> None:
    """Build the index of folders of PDFs."""
    run_checked("services.retriever", "ingest", *map(str, corpora), "--index", str(index))


@contextmanager
def open_services(folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Start the demo's retriever, judge, generator and searcher.

    Yields the flags of `trainer search` that name the first three, and those that name the
    searcher. `folder` has the index.
    """
    with ExitStack() as running:
        index = str(folder / "index")
        services = {"retriever": ("--index", index), "judge": ()}
        urls = running.enter_context(running_services(folder, services))
        generator = running.enter_context(serving(create_app()))
        policy = running.enter_context(serving(searcher().app))
        keys = {
            "retriever.url": urls["retriever"],
            "answering.judge.url": urls["judge"],
            "answering.generator.base_url": f"{generator}/v1",
            "answering.generator.model": GENERATOR,
        }
        yield (
            ["--config", str(CONFIG), *set_flags(keys)],
            ["--policy", f"{policy}/v1", "--model", SEARCHER],
        )


def trainer(*args: str) -> None:
    """Run a command of `trainer search`."""
    run_checked("trainer", "search", *args)
