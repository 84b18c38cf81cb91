"""Computes the stats of bench/results/roleplay_evidence.json from the folders of the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.roleplay.compare import Stage, read_stage
from evidence.roleplay.arms import ALL, ARMS, names_folder, run_folder
from scorekit.paired import paired_standard_error
from trainer.roleplay.reply import ParsedReply
from trainer.roleplay.rewards import REWARDS
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import mean_of

Line = Mapping[str, Any]

#: Of an evaluation, beside the rewards.
FIGURES = (
    "chrf",
    "copied_user",
    "copied_reference",
    "repeated",
    "distinct",
    "characters",
    "clipped_ratio",
    "kl_start",
    "character/name",
    "character/speech",
)
EXAMPLES = 4
_LAST = 5  # updates whose training rewards are reported


def summarise(folder: Path) -> dict[str, Any]:
    """Return the stats of all runs in `folder`, and of their start."""
    finished_runs = [
        (name, int(path.stem.removeprefix(f"{name}-")))
        for name in ARMS
        for path in sorted(folder.glob(f"{name}-[0-9]*.json"))
    ]
    first = read_stage("after SFT", run_folder(folder, *finished_runs[0]), first=True)
    hurt = read_stage("as it comes", folder / "hurt")
    return {
        "turns": len(first.lines),
        "weights": {reward.name: reward.weight for reward in REWARDS},
        "hurt": compute_stats(hurt),
        "start": compute_stats(first),
        "runs": [run_stats(folder, name, seed, first) for name, seed in finished_runs],
        "unseen_names": unseen_names(folder, [seed for name, seed in finished_runs if name == ALL]),
        "examples": examples(folder, hurt, first, finished_runs),
    }


def value(line: Line) -> float:
    """Return the weighted sum by the weights of the table, whatever the arm was rewarded by."""
    return sum(reward.weight * float(line["rewards"][reward.name]) for reward in REWARDS)


def compute_stats(stage: Stage) -> dict[str, float | None]:
    """Return means over the held-out turns."""
    stats: dict[str, float | None] = {"reward": mean_of([value(line) for line in stage.lines])}
    for reward in REWARDS:
        stats[reward.name] = mean_of([line["rewards"][reward.name] for line in stage.lines])
    stats |= {name: stage.stats.get(name) for name in FIGURES}
    return stats | {"narrations": float(len(narrations(stage.lines)))}


def narrations(lines: Sequence[Line]) -> set[str]:
    """Return the different narrations of some replies, without the names of their rows."""
    texts = set()
    for line in lines:
        narration = ParsedReply(line["completion"]).narration
        for name in (line["character_name"], line["player_name"]):
            narration = narration.replace(name, "") if name else narration
        texts.add(narration)
    return texts


def unseen_names(folder: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the stats of the start (seed None) and the runs with all functions, on unseen
    names.
    """
    stages = [(seed, names_folder(folder, seed)) for seed in (None, *seeds)]
    return [
        {"seed": seed, "end": compute_stats(read_stage("unseen names", stage))}
        for seed, stage in stages
        if stage.is_dir()
    ]


def run_stats(folder: Path, name: str, seed: int, start: Stage) -> dict[str, Any]:
    """Return the end of one run, and the paired changes of each reward and of chrF."""
    run = run_folder(folder, name, seed)
    end = read_stage("end", run)
    log = read_jsonl(run / "log.jsonl")
    pairs = list(zip(start.lines, end.lines, strict=True))
    changes = {"reward": [value(b) - value(a) for a, b in pairs]}
    for reward in REWARDS:
        key = reward.name
        changes[key] = [b["rewards"][key] - a["rewards"][key] for a, b in pairs]
    changes["chrf"] = [b["chrf"] - a["chrf"] for a, b in pairs]
    return {
        "arm": name,
        "seed": seed,
        "seconds": json.loads((folder / f"{run.name}.json").read_text())["seconds"],
        "updates": len(log),
        "training_reward": [line["reward_mean"] for line in log],
        "trained": mean_of([line["reward_mean"] for line in log[-_LAST:]]),
        "end": compute_stats(end),
        "changes": {key: _change(differences) for key, differences in changes.items()},
    }


def examples(
    folder: Path, hurt: Stage, start: Stage, runs: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Return the first held-out turns, and the replies of the first run of each arm."""
    firsts = dict(reversed(runs))
    ends = {name: read_stage(name, run_folder(folder, name, firsts[name])) for name in firsts}
    return [
        {
            "user": start.lines[k]["user"],
            "character": start.lines[k]["character_name"],
            "player": start.lines[k]["player_name"],
            "level": start.lines[k]["speech_level"],
            "reference": start.lines[k]["reference"],
            "hurt": hurt.lines[k]["completion"],
            "start": start.lines[k]["completion"],
            **{name: ends[name].lines[k]["completion"] for name in ARMS if name in ends},
        }
        for k in range(min(EXAMPLES, len(start.lines)))
    ]


def _change(differences: Sequence[float]) -> dict[str, float | None]:
    paired = paired_standard_error(differences)
    return {"change": paired.mean, "standard_error": paired.standard_error}
