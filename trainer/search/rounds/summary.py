"""Summarize the rounds in the folder of a loop as stats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorekit.documents import read_json
from trainer.runs.evaluation.files import lines_by_set
from trainer.runs.run_log import read_jsonl
from trainer.search.config import SearchRewardConfig
from trainer.search.rounds.config import RoundConfig, RoundsConfig
from trainer.search.rounds.steps import StepRecord, read_steps
from trainer.search.steps.table import IN_ROUND
from trainer.search.steps.table import step as step_of

REWARD = "reward_mean"
#: Stats of an evaluation: key -> title.
SHOWN = {
    REWARD: "reward",
    "ndcg_mean": "NDCG",
    "judge_mean": "judge's score",
    "success_share": "success",
    "turns_mean": "turns",
}
_PARTS = {"judge": "judge's score", "ndcg": "NDCG", "format": "form"}


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """The summary of a round.

    updates, episodes: of its training so far.
    reward: text of its formula.
    held_out: set -> (stats before the training, stats of its last evaluation).
    counts: command -> counts of its manifest.
    steps: the started steps.
    """

    name: str
    folder: Path
    updates: int
    episodes: int
    reward: str
    held_out: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
    counts: Mapping[str, Mapping[str, Any]]
    steps: Mapping[str, StepRecord]


def summarize_round(
    round_cfg: RoundConfig, folder: Path, reward: SearchRewardConfig
) -> RoundSummary:
    """Return the summary of a round, which may not have started.

    reward: of its training.
    """
    log = read_jsonl(folder / "train/log.jsonl")
    evaluations = lines_by_set(read_jsonl(folder / "train/eval.jsonl"))
    counts: dict[str, Any] = {}
    for command in round_cfg.then:
        path = folder / command / "manifest.json"
        if path.is_file():
            counts[command] = read_json(path)["counts"]
    return RoundSummary(
        name=round_cfg.name,
        folder=folder,
        updates=len(log),
        episodes=sum(line["samples"] for line in log),
        reward=reward_words(reward),
        held_out={name: (lines[0], lines[-1]) for name, lines in evaluations.items()},
        counts=counts,
        steps=read_steps(folder),
    )


def reward_words(reward: SearchRewardConfig) -> str:
    """Return the formula of a reward as text; equal texts are equal rewards."""
    parts = [f"{weight:g} {_PARTS[name]}" for name, weight in reward.weights.items() if weight]
    default_reward = SearchRewardConfig(
        **{f"w_{name}": weight_of_part for name, weight_of_part in reward.weights.items()}
    )
    more = [
        f"{key} {getattr(reward, key)}"
        for key in ("gate", "ndcg_gold", "forced_completion", "forced_penalty")
        if getattr(reward, key) != getattr(default_reward, key)
    ]
    return ", ".join([" + ".join(parts), *more])


def displayed_stats(
    rounds: Sequence[RoundSummary],
) -> Iterator[tuple[str, str, list[RoundSummary]]]:
    """Yield (key, title, comparable rounds) of each stat; each reward formula is one."""
    rewards = list(dict.fromkeys(summary.reward for summary in rounds))
    for key, title in SHOWN.items():
        if key != REWARD or len(rewards) == 1:
            yield key, title, list(rounds)
            continue
        for reward in rewards:
            comparable = [summary for summary in rounds if summary.reward == reward]
            yield key, f"{title} ({reward})", comparable


def rounds_table(
    cfg: RoundsConfig, rounds: Sequence[RoundSummary]
) -> tuple[list[str], list[list[str]]]:
    """Return (titles, lines) of a table with a column for each round.

    It has counts, cost, and the held-out stats of the first set before and after each training.
    Each reward formula has its own line, because values of two formulas are not comparable.
    """
    lines = [
        ["updates", *(str(summary.updates) for summary in rounds)],
        ["episodes", *(str(summary.episodes) for summary in rounds)],
    ]
    for key, title, compared in displayed_stats(rounds):
        pairs = [
            tuple(_value(summary, key, index) if summary in compared else None for index in (0, 1))
            for summary in rounds
        ]
        if any(after is not None for _, after in pairs):
            cells = [f"{_cell(before)} → {_cell(after)}" for before, after in pairs]
            lines.append([f"held out: {title}", *cells])
    for command in IN_ROUND:
        if step_of(command).drops and any(command in summary.then for summary in cfg.rounds):
            counts = [summary.counts.get(command) for summary in rounds]
            cells = ["–" if n is None else f"{n['kept']} of {n['rows']}" for n in counts]
            lines.append([f"{command}: kept", *cells])
    if any("hallucinations" in summary.then for summary in cfg.rounds):
        for command in ("focus", "distill"):
            cells = [_left_out(summary, command) for summary in rounds]
            lines.append([f"{command}: left out for hallucinations", *cells])
    steps = [summary.steps.values() for summary in rounds]
    lines += [
        ["calls", *(f"{sum(step.calls for step in group):,}" for group in steps)],
        ["tokens", *(f"{sum(step.tokens for step in group):,}" for group in steps)],
        ["hours", *(f"{sum(step.seconds for step in group) / 3600:.3f}" for group in steps)],
    ]
    return ["", *(summary.name for summary in rounds)], lines


def _left_out(summary: RoundSummary, command: str) -> str:
    """Return how many decisions of a command `hallucinations` has made; a dash if it did not run.

    A prompt that `distill` leaves out as a whole is one decision.
    """
    if command not in summary.counts:
        return "–"
    counts = summary.counts[command]["reasons"].items()
    prefix = "dropped: hallucinations: "
    return str(sum(count for reason, count in counts if reason.startswith(prefix)))


def _value(summary: RoundSummary, key: str, index: int) -> float | None:
    first = next(iter(summary.held_out.values()), None)
    return None if first is None else first[index].get(key)


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
