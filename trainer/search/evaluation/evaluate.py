"""How good a searcher is: an episode of each held-out question, rewarded as in training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scorekit.numeric.thresholds import below
from trainer.rl.world import World
from trainer.runs.config import THE_SET
from trainer.runs.runlog import Dumped, read_jsonl
from trainer.search.episodes import Episodes
from trainer.search.evaluation.figures import by_document, by_type, figures_of
from trainer.search.records import Question, Trajectory
from trainer.search.turns.policies import Policy

#: Share of the episodes that could have a reward which a mean has to cover to be held against the
#: means of other evaluations.
_RATED_FROM = 0.95
#: Figures that a report has as fields.
_OWN = ("samples", "reward_mean", "reward_coverage")
#: Those by groups -> what names one in its row.
_GROUPS = {"by_document": "document", "by_type": "type"}


@dataclass(slots=True)
class SearchReport:
    """Figures of an episode of each question; None where there is nothing to average.

    reward_mean: over the episodes that have one (reward_coverage). values: the other figures
    (evaluation/figures.py) by their keys, which `report[key]` gives too. by_document, by_type: a
    few of them, of each document that is asked about and of each type of question; {} of one.
    examples: the episodes (`records.Trajectory`) as JSON, without their ids.
    """

    samples: int
    reward_mean: float | None
    reward_coverage: float
    values: dict[str, Any]
    by_document: dict[str, dict[str, Any]]
    by_type: dict[str, dict[str, Any]]
    seconds: float
    examples: Sequence[dict[str, Any]]

    def __getitem__(self, key: str) -> Any:
        return self.figures()[key]

    @property
    def rating(self) -> float | None:
        """reward_mean, by which the best checkpoint is chosen; None where too many episodes have no
        reward: what a service left out may have been the hard ones."""
        could = self.samples - self.values["goldless"]
        covered = round(self.reward_coverage * self.samples)
        return None if below(covered, _RATED_FROM * could) else self.reward_mean

    def figures(self) -> dict[str, Any]:
        """All of them by their keys, `values` among the others; not the examples. Groups are rows:
        a tracker would take every number of a mapping, and there may be a thousand documents."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        del own["examples"]
        for key, name in _GROUPS.items():
            own[key] = [{name: group} | of for group, of in own[key].items()]
        return own.pop("values") | own

    @property
    def episodes(self) -> list[Trajectory]:
        """The examples as they were."""
        return [Trajectory.model_validate(line) for line in self.examples]


def evaluate_questions(
    episodes: Episodes,
    policy: Policy,
    questions: Sequence[Question],
    world: World,
    *,
    step: int,
    name: str,
) -> SearchReport:
    """Let the policy search once for each question, and have what it finds answered and judged.

    name: of the set; step: of the run; together they name the episodes. The processes of the world
    share the questions, and each gets the whole report. Raises what `Episodes` does: MoneySpent,
    ServiceUnreachable.
    """
    started = time.monotonic()
    ended = episodes.run(policy, world.share(questions), step=step, kind=f"{name}-")
    rewarded = list(episodes.rewarded(step, ended).values())
    values: dict[str, Any] = figures_of(rewarded)
    own = {key: values.pop(key) for key in _OWN}
    return SearchReport(
        **own,
        values=values,
        by_document=by_document(rewarded),
        by_type=by_type(rewarded),
        seconds=time.monotonic() - started,
        examples=[one.model_dump(mode="json", exclude={"tokens"}) for one in rewarded],
    )


def read_reports(folder: Path) -> dict[str, list[tuple[int, SearchReport]]]:
    """(update, report) of the evaluations in eval.jsonl of a run's folder, by the names of their
    sets."""
    sets: dict[str, list[tuple[int, SearchReport]]] = {}
    for line in read_jsonl(folder / "eval.jsonl"):
        name, update, dump = line.pop("set", THE_SET), line.pop("update"), line.pop("completions")
        line.pop("decides", None)
        own = {f.name: line.pop(f.name, None) for f in fields(SearchReport)}
        for key, of in _GROUPS.items():
            own[key] = {row.pop(of): row for row in own[key]}
        own |= {"values": line, "examples": Dumped(folder / dump)}
        sets.setdefault(name, []).append((update, SearchReport(**own)))
    return sets
