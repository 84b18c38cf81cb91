"""Two searchers on the same questions: paired differences with bootstrap intervals
(trainer/runs/verbs/paired.py), of all questions, by document and by type of question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainer.runs.verbs.paired import RESAMPLES, SEED, PairedFigure, compare_lines
from trainer.search.evaluation.episode_values import VALUES, values_of
from trainer.search.evaluation.figures import document_of, table
from trainer.search.records import Question, Trajectory

Pair = tuple[Trajectory, Trajectory]
ALL = "all"
#: Kind of group -> its name for a question.
_GROUPS: dict[str, Callable[[Question], str]] = {
    "type": lambda question: question.question_type,
    "document": document_of,
}


def compare_episodes(
    first: Sequence[Trajectory],
    second: Sequence[Trajectory],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> dict[str, list[PairedFigure]]:
    """Figures of all questions under ALL; and a few of them of each type of question ("type table")
    and of each document ("document sales.pdf"), where there are several.

    first, second: an episode of each question, in the same order. Raises ValueError where they are
    of other questions.
    """
    if [asked(one) for one in first] != [asked(one) for one in second]:
        raise ValueError("the two evaluations are not of the same questions in the same order")
    lines = [(values_of(a), values_of(b)) for a, b in zip(first, second, strict=True)]
    few = [figure for figure in table() if figure.by_group]
    found = {ALL: list(range(len(lines)))} | dict(_groups([one.question for one in first]))
    return {
        name: compare_lines(
            table() if name == ALL else few,
            [lines[place][0] for place in places],
            [lines[place][1] for place in places],
            resamples,
            seed,
        )
        for name, places in found.items()
    }


def _groups(questions: Sequence[Question]) -> Iterator[tuple[str, list[int]]]:
    for kind, name_of in _GROUPS.items():
        names = [name_of(question) or "(unknown)" for question in questions]
        several = list(dict.fromkeys(names))
        for name in several if len(several) > 1 else ():
            yield f"{kind} {name}", [place for place, of in enumerate(names) if of == name]


def asked(one: Trajectory) -> tuple[str, str]:
    """Which question an episode is of."""
    return one.question.id, one.question.question


def changed_most(
    first: Sequence[Trajectory], second: Sequence[Trajectory], shown: int
) -> list[tuple[str, list[Pair]]]:
    """(title, pairs of episodes): whose reward rose most and fell most, and the first of the set;
    by NDCG where the rewards of no question are known."""
    both = list(zip(first, second, strict=True))
    kinds: list[tuple[str, list[Pair]]] = []
    for name, key in (("the reward", "reward_mean"), ("NDCG", "ndcg_mean")):
        of = VALUES[key]
        changes = [
            (new - old, pair)
            for pair in both
            if (old := of(pair[0])) is not None and (new := of(pair[1])) is not None
        ]
        if changes:
            changes.sort(key=lambda change: change[0])
            rose = [pair for change, pair in reversed(changes) if change > 0]
            fell = [pair for change, pair in changes if change < 0]
            kinds = [
                (f"Improved most, says {name}", rose[:shown]),
                (f"Worsened most, says {name}", fell[:shown]),
            ]
            break
    kinds.append(("The first of the set", both[:shown]))
    return [(title, pairs) for title, pairs in kinds if pairs]
