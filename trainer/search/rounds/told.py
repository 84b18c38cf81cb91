"""What the folder of a loop says of its rounds, in figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.runs.config import THE_SET
from trainer.runs.runlog import read_jsonl
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.rounds.config import RoundConfig, RoundsConfig
from trainer.search.rounds.steps import StepRecord, read_steps

REWARD = "reward_mean"
#: Of an evaluation: key -> title.
SHOWN = {
    REWARD: "reward",
    "ndcg_mean": "NDCG",
    "judge_mean": "judge's score",
    "success_share": "success",
    "turns_mean": "turns",
}
_PARTS = {"judge": "judge's score", "ndcg": "NDCG", "format": "form"}


@dataclass(frozen=True, slots=True)
class RoundTold:
    """updates, episodes: of its training, so far. reward: what it is made of, in words. held_out:
    set -> (figures before the training, and behind its last evaluation). rows: command -> (kept, of
    so many). reasons: command -> what its manifest counts. steps: what was begun."""

    name: str
    folder: Path
    updates: int
    episodes: int
    reward: str
    held_out: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
    rows: Mapping[str, tuple[int, int]]
    reasons: Mapping[str, Mapping[str, int]]
    steps: Mapping[str, StepRecord]

    @property
    def hours(self) -> float:
        """Of work."""
        return sum(of.seconds for of in self.steps.values()) / 3600

    @property
    def calls(self) -> int:
        """Of paid servers."""
        return sum(of.calls for of in self.steps.values())

    @property
    def tokens(self) -> int:
        """Of these calls."""
        return sum(of.tokens for of in self.steps.values())


def told(of: RoundConfig, folder: Path, reward: SearchRewardConfig) -> RoundTold:
    """A round, begun or not. reward: of its training."""
    log = read_jsonl(folder / "train/log.jsonl")
    rows: dict[str, tuple[int, int]] = {}
    reasons: dict[str, dict[str, int]] = {}
    for command in of.then:
        path = folder / command / "manifest.json"
        if path.is_file():
            counts = json.loads(path.read_text(encoding="utf-8"))["counts"]
            rows[command] = counts["kept"], counts["rows"]
            reasons[command] = counts["reasons"]
    return RoundTold(
        name=of.name,
        folder=folder,
        updates=len(log),
        episodes=sum(line["samples"] for line in log),
        reward=reward_words(reward),
        held_out=_held_out(read_jsonl(folder / "train/eval.jsonl")),
        rows=rows,
        reasons=reasons,
        steps=read_steps(folder),
    )


def _held_out(
    lines: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        sets.setdefault(line.get("set", THE_SET), []).append(line)
    return {name: (of[0], of[-1]) for name, of in sets.items()}


def reward_words(reward: SearchRewardConfig) -> str:
    """Return what a reward is made of; equal texts are equal rewards."""
    parts = [f"{weight:g} {_PARTS[name]}" for name, weight in reward.weights.items() if weight]
    usual = SearchRewardConfig(**{f"w_{name}": of for name, of in reward.weights.items()})
    more = [
        f"{key} {getattr(reward, key)}"
        for key in ("gate", "ndcg_gold", "forced_completion", "forced_penalty")
        if getattr(reward, key) != getattr(usual, key)
    ]
    return ", ".join([" + ".join(parts), *more])


def figures_shown(rounds: Sequence[RoundTold]) -> Iterator[tuple[str, str, list[RoundTold]]]:
    """Yield (key, title, the rounds whose values compare with one another) of each figure. A reward
    that only some rounds have is a figure of its own."""
    rewards = list(dict.fromkeys(of.reward for of in rounds))
    for key, title in SHOWN.items():
        if key != REWARD or len(rewards) == 1:
            yield key, title, list(rounds)
            continue
        for reward in rewards:
            yield key, f"{title} ({reward})", [of for of in rounds if of.reward == reward]


def rounds_table(
    cfg: RoundsConfig, rounds: Sequence[RoundTold]
) -> tuple[list[str], list[list[str]]]:
    """(titles, lines): a column a round. What was played, kept and spent, and the held-out figures
    of the first set before and behind each training: each reward in a line of its own, since values
    of two rewards do not compare."""
    lines = [
        ["updates", *(str(of.updates) for of in rounds)],
        ["episodes", *(str(of.episodes) for of in rounds)],
    ]
    for key, title, compared in figures_shown(rounds):
        values = [tuple(_value(of, key, at) for at in (0, 1)) for of in rounds]
        values = [
            pair if of in compared else (None, None)
            for of, pair in zip(rounds, values, strict=True)
        ]
        if any(then is not None for _, then in values):
            pairs = [(_cell(now), _cell(then)) for now, then in values]
            lines.append([f"held out: {title}", *(f"{now} → {then}" for now, then in pairs)])
    for command in _COMMANDS:
        if any(command in of.then for of in cfg.rounds):
            kept = [of.rows.get(command) for of in rounds]
            cells = ["–" if one is None else f"{one[0]} of {one[1]}" for one in kept]
            lines.append([f"{command}: kept", *cells])
    lines += [
        ["calls", *(f"{of.calls:,}" for of in rounds)],
        ["tokens", *(f"{of.tokens:,}" for of in rounds)],
        ["hours", *(f"{of.hours:.3f}" for of in rounds)],
    ]
    return ["", *(of.name for of in rounds)], lines


_COMMANDS = ("hallucinations", "verify", "focus", "budget", "distill", "rewrite")


def _value(of: RoundTold, key: str, place: int) -> float | None:
    first = next(iter(of.held_out.values()), None)
    return None if first is None else first[place].get(key)


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
