"""Does GRPO raise a role-play policy that learned from clean dialogues only, and by whose measure?

    python -m evidence.roleplay.clean            # what stands in runs/roleplay_clean is kept
    python -m evidence.roleplay.clean --report   # write its section of the page again

The start learns the grammar's clean dialogues, then has rounds of SFT until chrF of the
development turns stays where it is. Arms: GRPO with all five rewards, the same with rewards of
other replies, and more SFT of equal compute. They are measured on turns that nothing was chosen on,
by the rewards, and by a judge that is not among them (evidence.roleplay.judge).
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from bench.common import RESULTS, ROOT, WORK, machine, markdown_table, write_json
from evidence.gain.runs import processor_seconds
from evidence.roleplay.arms import CONFIG
from evidence.seeds import (
    PAGES,
    SeedInterval,
    against,
    bullet,
    check_arms,
    read_runs,
    seed_interval,
    wrapped,
    write_section,
)
from scorekit.command import clean_exit
from scorekit.digest import digest_files
from scorekit.errors import UserError
from scorekit.files import replacing_folder
from testing.processes import exit_on_sigterm, running_service

RUNS = ROOT / "runs/roleplay_clean"
PAGE = PAGES / "roleplay.md"
BEGIN = "<!-- written by `python -m evidence.roleplay.clean --report` -->"
END = "<!-- end of what is written on the clean policy -->"
SFT_CONFIG = ROOT / "configs/sft/demo.yaml"
TURNS = {name: ROOT / f"demo/data/roleplay/{name}.jsonl" for name in ("heldout", "final_test")}
SEEDS = (1, 2, 3, 4, 5)
START, GRPO, SFT, SHUFFLED = "start", "grpo", "sft", "shuffled"
ARMS = {
    GRPO: "GRPO, all five",
    SFT: "continued SFT",
    SHUFFLED: "GRPO, shuffled (control)",
}
#: A round of SFT gains nothing if chrF ends less than this above the best so far.
LEAST_GAIN = 0.3
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the runs.

    base, chat: steps of the two trainings on clean dialogues (demo/train/roleplay/policy.py).
    dialogues: of SFT.
    round_steps: of a round of SFT, of 16 dialogues each.
    rounds: at most.
    judge: steps of its training.
    updates: of GRPO.
    steps: of continued SFT, which are to take the processor seconds of GRPO and the embedder; the
    page says what they took.
    turns: that are measured, at most.
    """

    base: int = 2600
    chat: int = 500
    dialogues: int = 1000
    round_steps: int = 60
    rounds: int = 4
    judge: int = 2500
    updates: int = 24
    steps: int = 140
    turns: int = 200


QUICK = Size(base=2, chat=2, dialogues=60, round_steps=2, rounds=1, judge=2, updates=2, turns=8)

#: Returns a number of a measured policy.
Stat = Callable[[Mapping[str, Any]], float]
STATS: dict[str, tuple[Stat, int]] = {
    "judge, nats a token": (lambda stats: statistics.fmean(stats["judge"]), 3),
    "share of distinct replies": (lambda stats: statistics.fmean(stats["is_new"]), 3),
    "weighted sum of the rewards": (lambda stats: statistics.fmean(stats["reward"]), 3),
    "chrF": (lambda stats: statistics.fmean(stats["chrf"]), 1),
}


# -- the start and the judge --------------------------------------------------------------------


def write_dialogues(path: Path, count: int) -> None:
    """Write clean dialogues of scenarios that no measured turn has."""
    from demo.train.roleplay.data import SFT_SEED, write
    from demo.train.roleplay.grammar import dialogue

    rng = random.Random(SFT_SEED)
    dialogues = [dialogue(rng, f"clean-{number:04d}") for number in range(count)]
    write(path, ({"messages": d.messages(len(d.turns))} for d in dialogues))


def serve_embedder(folder: Path) -> AbstractContextManager[str]:
    """Serve the demo's encoder; yield its URL. Its cache is new: a run pays for its embeddings."""
    from demo.roleplay.run import ENCODER

    for path in folder.glob("embedder.sqlite*"):
        path.unlink()
    return running_service("embedder", folder, "--model", str(ENCODER))


def make_start(folder: Path, size: Size) -> None:
    """Make `policy`, its `start.json` and the file of clean dialogues, unless they are there."""
    from demo.common import run_checked
    from evidence.gain.start import is_flat

    if (folder / "start.json").is_file():
        return
    from_base = ("--start", str(folder / "base"), "--batch", "8", "--rate", "1e-3")
    stages: list[tuple[str, int, tuple[str, ...]]] = [("base", size.base, ())]
    for name, steps, flags in [*stages, ("chat", size.chat, from_base)]:
        if not (folder / name).is_dir():
            with replacing_folder(folder / name) as part:  # a killed training leaves no folder
                options = ("--steps", str(steps), "--out", str(part))
                run_checked("demo.train.roleplay.policy", name, *flags, *options)
    write_dialogues(folder / "dialogues.jsonl", size.dialogues)
    template = folder / "chat_template.jinja"
    template.unlink(missing_ok=True)
    data = ("--model", str(folder / "chat"), "--data", str(folder / "dialogues.jsonl"))
    run_checked("trainer", "template-check", *data, "--limit", "50", "--fix", "--to", str(template))
    curve: list[dict[str, Any]] = []
    policy = folder / "chat"
    for number in range(1, size.rounds + 1):
        out = folder / f"round{number}"
        if not out.is_dir():
            train_sft(folder, policy, out, size.round_steps, number)
        with serve_embedder(folder) as embedder:
            stats = evaluate(folder, out, "heldout", embedder, size)
        means = {name: statistics.fmean(stats[name]) for name in ("chrf", "reward")}
        curve.append({"stage": out.name, **means})
        console.print(f"{out.name}: chrF {means['chrf']:.2f}, reward {means['reward']:.3f}")
        policy = out
        if is_flat([line["chrf"] for line in curve], LEAST_GAIN):
            break
    best = max(curve, key=lambda line: line["chrf"])
    shutil.copytree(folder / best["stage"], folder / "policy", dirs_exist_ok=True)
    write_json(folder / "start.json", {"curve": curve, "chosen": best["stage"]})


def measured_turns() -> list[dict[str, Any]]:
    """Return the turns that measure."""
    from demo.train.data import read_jsonl

    return read_jsonl(TURNS["final_test"])


def make_judge(folder: Path, size: Size) -> dict[str, Any]:
    """Train the judge, unless it is there.

    Return `accuracies`, and of the grammar's own replies to the measured turns `grammar`: means of
    the judge's score, in nats a token, and of `is_new`.
    """
    from transformers import AutoTokenizer

    from demo.train.common import setup
    from evidence.roleplay.judge import ReplyJudge, check_judge, train_judge

    setup(1)
    if not (folder / "judge").is_dir():
        tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
        measured = {turn["prompt"][0]["content"] for turn in measured_turns()}
        with replacing_folder(folder / "judge") as part:
            train_judge(tokenizer, part, size.judge, measured)
    path = folder / "judge.json"
    if not path.is_file():
        judge, turns = ReplyJudge(folder / "judge"), measured_turns()[: size.turns]
        prompts, references = ([turn[key] for turn in turns] for key in ("prompt", "reference"))
        grammar = {
            "judge": statistics.fmean(judge.score(prompts, references)),
            "is_new": statistics.fmean(is_new(turns, references)),
        }
        accuracies = check_judge(judge, size.turns)
        write_json(path, {"accuracies": accuracies, "grammar": grammar})
    stats: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stats


# -- runs ---------------------------------------------------------------------------------------


def train_sft(folder: Path, policy: Path, to: Path, steps: int, seed: int) -> None:
    """Run SFT on the clean dialogues, and export its last checkpoint to `to`."""
    from demo.common import run_checked
    from demo.roleplay.run import run_trainer

    run = folder / f"{to.name}-run"
    settings = {
        "policy.path": policy,
        "data.train": folder / "dialogues.jsonl",
        "chat.template": folder / "chat_template.jinja",
        "sft.max_steps": steps,
        "sft.warmup_steps": min(4, steps - 1),
        "misc.seed": seed,
        "misc.run_dir": run,
        "misc.overwrite": "true",
    }
    run_trainer("sft", SFT_CONFIG, settings)
    shutil.rmtree(to, ignore_errors=True)
    run_checked("trainer", "export", str(run), "--to", str(to))
    shutil.rmtree(run)


def train_grpo(
    folder: Path, to: Path, embedder: str, size: Size, seed: int, shuffled: bool
) -> None:
    """Run GRPO, and export its last checkpoint to `to`. shuffled: of rewards of other replies."""
    from demo.common import run_checked, set_flags
    from demo.roleplay.run import steps_of

    run = folder / f"{to.name}-run"
    settings = {
        "policy.path": folder / "policy",
        "reward.embedding_model": embedder,
        "data.eval": "null",
        **steps_of(size.updates),
        "misc.seed": seed,
        "misc.run_dir": run,
        "misc.overwrite": "true",
    }
    module = "evidence.roleplay.control" if shuffled else "trainer"
    run_checked(module, "train", "--config", str(CONFIG), *set_flags(settings))
    shutil.rmtree(to, ignore_errors=True)
    run_checked("trainer", "export", str(run), "--to", str(to))
    shutil.rmtree(run)


def evaluate(
    folder: Path, policy: Path, turns: str, embedder: str, size: Size
) -> dict[str, list[Any]]:
    """Return a policy's replies to a set of turns, their weighted rewards, and their chrF."""
    from demo.common import read_evaluation
    from demo.roleplay.run import run_trainer
    from evidence.roleplay.summary import value

    run = folder / f"{policy.name}-{turns}"
    settings = {
        "policy.path": policy,
        "data.eval": TURNS[turns],
        "eval.eval_limit": size.turns,
        "reward.embedding_model": embedder,
        "misc.run_dir": run,
    }
    run_trainer("evaluate", CONFIG, settings, "--overwrite")
    _, lines = read_evaluation(run)
    shutil.rmtree(run)
    return {
        "id": [line["id"] for line in lines],
        "completion": [line["completion"] for line in lines],
        "reward": [round(value(line), 4) for line in lines],
        "chrf": [round(line["chrf"], 2) for line in lines],
    }


def judged(folder: Path, stats: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the stats with the judge's scores and `is_new` in place of the texts."""
    from evidence.roleplay.judge import ReplyJudge

    by_id = {turn["id"]: turn for turn in measured_turns()}
    turns, replies = [by_id[name] for name in stats["id"]], stats["completion"]
    scores = ReplyJudge(folder / "judge").score([turn["prompt"] for turn in turns], replies)
    numbers = {name: values for name, values in stats.items() if name not in ("id", "completion")}
    rounded = [round(score, 4) for score in scores]
    return {"judge": rounded, "is_new": is_new(turns, replies), **numbers}


def is_new(turns: Sequence[Mapping[str, Any]], replies: Sequence[str]) -> list[int]:
    """Return 1 for each reply that no earlier turn got, else 0. The names in it do not count."""
    seen: set[str] = set()
    values = []
    for turn, reply in zip(turns, replies, strict=True):
        for name in ("character_name", "player_name"):
            reply = reply.replace(turn[name], name)
        text = " ".join(reply.split())
        values.append(int(text not in seen))
        seen.add(text)
    return values


def run_plan(
    folder: Path, results: Path, only: Sequence[str], seeds: Sequence[int], size: Size
) -> None:
    """Make what is missing: start, judge, and runs, seed by seed."""
    folder.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    make_start(folder, size)
    stats = make_judge(folder, size)
    curve = json.loads((folder / "start.json").read_text(encoding="utf-8"))
    write_json(results / "start.json", {**curve, "judge": stats})
    names = [name for name in ARMS if not only or name in only]
    for seed, name in [(0, START), *((seed, name) for seed in seeds for name in names)]:
        path = results / f"{name}-{seed}.json"
        if not is_done(path, start_digest(folder), size):
            run_one(folder, path, name, seed, size)


def start_digest(folder: Path) -> str:
    """Return a digest of the weights of the start and of the judge."""
    return digest_files(folder / name / "model.safetensors" for name in ("policy", "judge"))


def is_done(path: Path, start: str, size: Size) -> bool:
    """Return whether a run has a result of these sizes.

    start: digest of the start and the judge. Raises UserError if the result is of others: runs of
    two starts, or two judges, cannot stand in one table.
    """
    if not path.is_file():
        return False
    recorded = json.loads(path.read_text(encoding="utf-8"))
    if recorded.get("start") != start:
        raise UserError(
            f"{path}: is of another start or judge. Move {path.parent} away to run all arms again"
        )
    return bool(recorded["size"] == asdict(size))


def run_one(folder: Path, path: Path, name: str, seed: int, size: Size) -> None:
    """Train and measure a run. path: of its result."""
    with serve_embedder(folder) as url:
        _run_one(folder, path, name, seed, url, size)


def _run_one(folder: Path, path: Path, name: str, seed: int, url: str, size: Size) -> None:
    """Do what run_one says. url: of an embedder."""
    policy, spent = folder / "policy", 0.0
    if name != START:
        policy, before = folder / f"{name}-{seed}", processor_seconds()
        console.print(f"[bold]{ARMS[name]}[/], seed {seed}")
        if name == SFT:
            train_sft(folder, folder / "policy", policy, size.steps, 100 + seed)
        else:
            train_grpo(folder, policy, url, size, seed, name == SHUFFLED)
        spent = processor_seconds() - before
    stats = judged(folder, evaluate(folder, policy, "final_test", url, size))
    line = {"arm": name, "seed": seed, "start": start_digest(folder), "size": asdict(size)}
    line |= {"commit": machine()["commit"], "processor_seconds": spent, "stats": stats}
    write_json(path, line)
    values = ", ".join(f"{title} {stat(stats):.3f}" for title, (stat, _) in STATS.items())
    console.print(f"  {spent:.0f} processor seconds: {values}")


# -- tables -------------------------------------------------------------------------------------


def read_results(folder: Path) -> dict[str, Any]:
    """Return `start` and `runs`."""
    start = folder / "start.json"
    if not start.is_file():
        raise UserError(f"{folder}: has no result yet. Run this without --report first")
    return {"start": json.loads(start.read_text("utf-8")), "runs": read_runs(folder)}


def changes_of(runs: Sequence[Mapping[str, Any]], stat: Stat) -> dict[str, dict[int, float]]:
    """Return arm -> seed -> change of a stat from the start."""
    before = next(stat(run["stats"]) for run in runs if run["arm"] == START)
    changes = {
        name: {run["seed"]: stat(run["stats"]) - before for run in runs if run["arm"] == name}
        for name in ARMS
    }
    return {name: values for name, values in changes.items() if values}


def stat_table(runs: Sequence[Mapping[str, Any]], stat: Stat, digits: int) -> str:
    """Return the changes of the arms from the start, from continued SFT, and from the control."""
    changes, rows = changes_of(runs, stat), []
    for name, values in changes.items():
        by_seed = ", ".join(f"{values[seed]:+.{digits}f}" for seed in sorted(values))
        cells = [by_seed, seed_interval(list(values.values())).as_text(digits)]
        for other in (SFT, SHUFFLED):
            less = None if other == name else against(values, changes.get(other, {}))
            cells.append("" if less is None else less.as_text(digits))
        spent = statistics.fmean(run["processor_seconds"] for run in runs if run["arm"] == name)
        rows.append([ARMS[name], *cells, f"{spent:.0f}"])
    head = ["", "seed by seed", "from the start", "less continued SFT", "less the control"]
    return markdown_table([*head, "processor s"], rows)


def tables(results: Mapping[str, Any]) -> str:
    """Return the tables of the section, in Markdown."""
    runs, start = results["runs"], results["start"]
    first = next(run for run in runs if run["arm"] == START)["stats"]
    stages = ", ".join(f"{line['stage']} {line['chrf']:.2f}" for line in start["curve"])
    accuracies = ", ".join(
        f"{100 * value:.0f} % ({name})" for name, value in start["judge"]["accuracies"].items()
    )
    grammar = start["judge"]["grammar"]
    means = ", ".join(f"{title} {stat(first):.{d}f}" for title, (stat, d) in STATS.items())
    spent = sum(run["processor_seconds"] for run in runs) / 3600
    parts = [
        wrapped(
            f"chrF of the development turns by round of SFT: {stages}; frozen: {start['chosen']}. "
            f"The judge prefers the grammar's own reply to a worse one in {accuracies}. The start "
            f"on {len(first['judge'])} unseen turns: {means}. The grammar's own replies to them: "
            f"{grammar['judge']:.3f} nats a token, {grammar['is_new']:.3f} distinct. "
            f"The test turns were answered {len(runs)} times, once by each policy. "
            f"All trainings: {spent:.2f} core-hours. "
            f"Commit `{runs[-1]['commit']}`. {' '.join(caveats(runs, start['curve']))}"
        )
    ]
    for title, (stat, digits) in STATS.items():
        parts += [f"### Clean start, {title}: change", stat_table(runs, stat, digits)]
    parts += ["### Clean start: what the tables say"]
    parts += ["\n".join(bullet(line) for line in verdicts(runs))]
    return "\n\n".join(parts)


def caveats(runs: Sequence[Mapping[str, Any]], curve: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence if the start was stopped early, and one on the compute of the arms."""
    from evidence.gain.start import is_flat

    out = []
    if not is_flat([line["chrf"] for line in curve], LEAST_GAIN):
        out.append("**The start's chrF still rose in its last round: a gain over it is no gain.**")
    spent = {
        name: statistics.fmean(seconds)
        for name in (GRPO, SFT)
        if (seconds := [run["processor_seconds"] for run in runs if run["arm"] == name])
    }
    if len(spent) == 2:
        ratio = spent[SFT] / spent[GRPO]
        out.append(f"Continued SFT took {ratio:.2f} times the processor seconds of GRPO.")
    return out


def verdicts(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each stat, computed from the numbers."""
    out = []
    for title, (stat, digits) in STATS.items():
        changes = changes_of(runs, stat)
        grpo = changes.get(GRPO, {})
        if len(grpo) < 3:
            return ["GRPO has fewer than 3 seeds: nothing is shown."]
        parts = [("the start", seed_interval(list(grpo.values())))]
        for name, other in ((SFT, "continued SFT"), (SHUFFLED, "the control")):
            parts += [(other, less)] if (less := against(grpo, changes.get(name, {}))) else []
        relations = "; ".join(
            f"{relation_of(less)} {other} ({less.as_text(digits)})" for other, less in parts
        )
        out.append(f"{title}, GRPO over {len(grpo)} seeds: {relations}.")
    return out


def relation_of(interval: SeedInterval) -> str:
    """Return where an interval lies."""
    if not interval.is_clear:
        return "not told apart from"
    return "above" if interval.mean > 0 else "below"


def main(
    quick: Annotated[bool, typer.Option(help="Two updates: does it run at all?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This arm; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="This seed; may be given again.")] = None,
    report: Annotated[bool, typer.Option(help="Only write the page, from the results.")] = False,
) -> None:
    """Train and measure what is missing; write results and page, and say what they show."""
    exit_on_sigterm()
    folder = WORK / "roleplay_clean" if quick else RUNS
    results = folder / "results" if quick else RESULTS / "roleplay_clean"
    with clean_exit(stdout="log"):
        check_arms(only or [], ARMS)
        if not report:
            chosen = seeds or ([1] if quick else SEEDS)
            run_plan(folder, results, only or [], chosen, QUICK if quick else Size())
        text = tables(read_results(results))
        Console(width=160).print(Markdown(text))
        if not quick:
            write_section("A policy of clean dialogues", BEGIN, END, text, PAGE)


if __name__ == "__main__":
    typer.run(main)
