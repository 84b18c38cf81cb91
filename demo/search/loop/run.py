"""The loop demo: a small searcher, questions some of which have wrong references, and a verifier
that makes errors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from demo.common import ROOT, TRAINER_THREADS, console, set_flags
from demo.search.generator import create_app
from demo.search.loop.knowing import NAME as KNOWING
from demo.search.loop.knowing import KnowingAnswerer, is_known
from demo.search.loop.verifier import NAME, Verifying
from demo.search.loop.wrong_references import plant, read_rows, write_rows
from demo.search.make_corpus import TRAIN
from demo.search.reading import Reader
from demo.search.run import HERE, ingest, open_services, trainer
from scorekit.errors import UserError
from scorekit.files import write_atomic
from testing.processes import exit_on_sigterm, serving

ROUNDS = ROOT / "configs/search/demo_rounds.yaml"
#: The generator knows the answer of one in so many training questions, and none held out.
KNOWN_ONE_IN = 4
#: Share of the sets of pages that make it answer from them alone.
DISTRACTED = 0.75


def run_demo(run_dir: Path, *, updates: int | None, every: int, error: float, seed: int) -> None:
    """Run the demo. Raise UserError if a part of it cannot run."""
    started = time.monotonic()
    exit_on_sigterm()
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "index").exists():
        ingest(run_dir / "index", HERE / "corpus")
    rows, wrong = _rows(run_dir, every, seed)
    memorized_ids = {row["id"] for row in rows if is_known(row["question"], KNOWN_ONE_IN)}
    console.print(
        f"[bold]{len(rows)} questions[/], {len(wrong)} of them with a wrong reference; the "
        f"generator knows the answers of {len(memorized_ids)} by heart; which other pages have "
        "the same facts is not told"
    )
    verifier = create_app(name=NAME, answerer=Verifying(error=error, seed=seed))
    generator = create_app(
        name=KNOWING,
        answerer=KnowingAnswerer((TRAIN,), one_in=KNOWN_ONE_IN, distracted=DISTRACTED),
    )
    with (
        open_services(run_dir) as (settings, _),
        serving(verifier) as url,
        serving(generator) as generator_url,
    ):
        values = {
            **{f"train.{key}": value for key, value in map(_pair, settings[3::2])},
            "train.answering.generator.base_url": f"{generator_url}/v1",
            "train.answering.generator.model": KNOWING,
            "train.data.train": run_dir / "questions.jsonl",
            "train.misc.seed": seed,
            "train.misc.threads": TRAINER_THREADS,
            "sft.misc.threads": TRAINER_THREADS,
            "curation.verify.verifier.base_url": f"{url}/v1",
            "curation.verify.verifier.model": NAME,
        }
        rounds = run_dir / "rounds.yaml"
        write_atomic(rounds, yaml.safe_dump(rounds_of(updates), sort_keys=False))
        trainer(
            "loop", "--rounds", str(rounds), "--out", str(run_dir / "rounds"), *set_flags(values)
        )
    show_truth(run_dir / "rounds/01-phase1", wrong)
    show_known(run_dir / "rounds/02-round1", memorized_ids)
    for line in training_sentences(run_dir / "rounds"):
        console.print(f"   {line}")
    console.print(f"\nThe whole demo took {time.monotonic() - started:.0f} s.")


def rounds_of(updates: int | None = None) -> dict[str, Any]:
    """Return the demo's rounds.

    updates: of each training; None keeps the config's.
    """
    rounds: dict[str, Any] = yaml.safe_load(ROUNDS.read_text(encoding="utf-8"))
    if updates is not None:
        for round_config in rounds["rounds"]:
            round_config["train"]["rl"]["num_updates"] = updates
    return rounds


def _pair(flag: str) -> tuple[str, str]:
    key, _, value = flag.partition("=")
    return key, value


def _rows(run_dir: Path, every: int, seed: int) -> tuple[list[dict[str, Any]], set[str]]:
    """Return questions with planted errors and without alternatives, and the ids of the wrong
    ones.
    """
    rows, wrong = plant(read_rows()[::every], Reader(), seed)
    path, public_rows = run_dir / "questions.jsonl", [row | {"alternatives": {}} for row in rows]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in public_rows)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(
            f"{run_dir}: was begun with another --every or --seed: set it back, or name another "
            "--run-dir"
        )
    write_rows(path, public_rows)
    return rows, wrong


def show_truth(folder: Path, wrong: set[str]) -> None:
    """Print how many of the planted errors the first round detected. Only the demo knows them."""
    verified = _decisions(folder / "verify")
    num_detected = sum(not verified[id]["kept"] for id in wrong)
    num_wrongly_dropped = sum(not row["kept"] for id, row in verified.items() if id not in wrong)
    grown = _decisions(folder / "alternatives")
    planted = {row["id"]: row["alternatives"] for row in read_rows()}
    pages = {
        id: {page for pages_of_fact in planted[id].values() for page in pages_of_fact}
        for id in grown
        if planted[id]
    }
    lines = (folder / "alternatives/rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    got = {
        row["id"]: {
            p for pages_of_fact in row.get("alternatives", {}).values() for p in pages_of_fact
        }
        for row in rows
    }
    right = sum(len(got[id] & pages_of_fact) for id, pages_of_fact in pages.items())
    truth_table = Table("planted", "found", "dropped or named wrongly")
    truth_table.add_row(
        f"{len(wrong)} wrong references", str(num_detected), f"{num_wrongly_dropped} right ones"
    )
    total = sum(map(len, pages.values()))
    more = sum(len(pages_of_fact - pages.get(id, set())) for id, pages_of_fact in got.items())
    truth_table.add_row(f"{total} pages with the same fact", str(right), f"{more} other pages")
    console.print(truth_table)


def training_sentences(rounds: Path) -> list[str]:
    """Return sentences on what each training did to the held-out questions, from its evaluations.

    A training without a judge is told by NDCG.
    """
    parts, ends = [], dict[str, float]()
    for path in sorted(rounds.glob("*/train/eval.jsonl")):
        name = path.parent.parent.name.partition("-")[2]
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        is_judged = lines[-1]["judge_mean"] is not None
        key, title = ("judge_mean", "right answers") if is_judged else ("ndcg_mean", "NDCG")
        first, last = lines[0][key], lines[-1][key]
        parts.append(f"{name}: {title} {first:.2f} -> {last:.2f}")
        if is_judged:
            ends[name] = last
    out = [f"Held-out questions, before and after each training. {'; '.join(parts)}."]
    if ends:
        best, last_name = max(ends, key=lambda name: ends[name]), list(ends)[-1]
        if ends[best] > ends[last_name]:
            out.append(f"The best policy is that of {best}: {last_name} made it worse.")
        else:
            out.append(f"The best policy is the last one, that of {last_name}.")
    out.append(
        "In this run, one seed. Another can differ: docs/explanation/evidence/loop.md has five, of "
        "two rounds."
    )
    return out


def show_known(folder: Path, memorized_ids: set[str]) -> None:
    """Print what `hallucinations` found in a round, and what focus and distill left out for it.

    memorized_ids: ids of the questions that the generator knows by heart. Only the demo knows them.
    """
    if not (folder / "hallucinations").is_dir():
        return  # no row was left for this round
    prompts = _decisions(folder / "hallucinations")
    by_heart = {id for id, row in prompts.items() if row["reason"] == "own_knowledge"}
    num_suspects = sum(row["suspects"] for row in prompts.values())
    lost_rows, lost_episodes = (
        [
            row
            for row in _decisions(folder / command).values()
            if row["reason"].startswith("hallucinations: ")
        ]
        for command in ("focus", "distill")
    )
    table = Table("right without evidence", "found", "really known by heart")
    table.add_row("episodes", str(num_suspects), "")
    table.add_row(
        "questions known by heart", str(len(by_heart)), str(len(by_heart & memorized_ids))
    )
    table.add_row(
        "questions that focus left out for it",
        str(len(lost_rows)),
        str(sum(row["id"] in memorized_ids for row in lost_rows)),
    )
    # a question that is left out as a whole has one line, with the number of its right episodes
    lost_by_question = [(row["question_id"], row.get("right", 1)) for row in lost_episodes]
    table.add_row(
        "right episodes that distill left out for it",
        str(sum(count for _, count in lost_by_question)),
        str(sum(count for id, count in lost_by_question if id in memorized_ids)),
    )
    console.print(table)


def _decisions(folder: Path) -> Mapping[str, Any]:
    lines = (folder / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}
