"""Labeled Korean sentences, and how often each rule decides as the label says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.roleplay.korean.acting import acts, has_particle
from trainer.roleplay.korean.questions import asks
from trainer.roleplay.korean.speech import levels

FOLDER = Path(__file__).parent
#: "work": rules were written with these in sight. "unseen": read for the first time at the end.
HALVES = ("work", "unseen")


class LabeledSentence(NamedTuple):
    """A sentence, its label, and the names of a narration's player and character."""

    text: str
    label: str
    player: str = ""
    character: str = ""


class Decision(NamedTuple):
    """A rule that decides yes or no.

    file: which sentences it reads.
    positive: the labels for which yes is right.
    skipped: labels that have no right answer.
    """

    title: str
    file: str
    decide: Callable[[LabeledSentence], bool]
    positive: frozenset[str]
    skipped: frozenset[str] = frozenset()


class Accuracy(NamedTuple):
    """The counts of one decision, and the sentences that it decided wrongly."""

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int
    errors: tuple[LabeledSentence, ...]

    @property
    def num_sentences(self) -> int:
        """Return how many sentences were decided."""
        return sum(self[:4])

    @property
    def accuracy(self) -> float:
        """Return the share of right decisions."""
        return (self.true_positives + self.true_negatives) / self.num_sentences

    @property
    def precision(self) -> float | None:
        """Return the share of yes that is right; None if the rule never says yes."""
        num_yes = self.true_positives + self.false_positives
        return self.true_positives / num_yes if num_yes else None

    @property
    def recall(self) -> float | None:
        """Return the share of positive sentences that the rule finds; None if there are none."""
        num_positive = self.true_positives + self.false_negatives
        return self.true_positives / num_positive if num_positive else None


def speech_level(text: str) -> str:
    """Return polite or plain if all decided sentences agree, "neither" if none is decided."""
    decided = {level for level in levels(text) if level in ("polite", "plain")}
    return decided.pop() if len(decided) == 1 else "mixed" if decided else "neither"


DECISIONS = (
    Decision(
        "player_name_rule: subject",
        "names",
        lambda row: acts(row.text, row.player, row.character),
        frozenset({"acts"}),
    ),
    Decision(
        "player_name_rule: literal",
        "names",
        lambda row: has_particle(row.text, row.player, row.character),
        frozenset({"acts", "particle"}),
    ),
    Decision(
        "the user asks",
        "questions",
        lambda row: asks(row.text),
        frozenset({"question"}),
        frozenset({"ambiguous"}),
    ),
    Decision(
        "speech level: polite",
        "speech",
        lambda row: speech_level(row.text) == "polite",
        frozenset({"polite"}),
    ),
    Decision(
        "speech level: plain",
        "speech",
        lambda row: speech_level(row.text) == "plain",
        frozenset({"plain"}),
    ),
)


def read_sentences(file: str, half: str) -> list[LabeledSentence]:
    """Return the sentences of `names`, `questions` or `speech`, of one half."""
    return list(_parse((FOLDER / f"{file}_{half}.txt").read_text(encoding="utf-8").splitlines()))


def _parse(lines: Sequence[str]) -> Iterator[LabeledSentence]:
    heading: list[str] = []
    for line in lines:
        if line.startswith("# "):
            heading = [cell.strip() for cell in line[2:].split("|")]
        elif line.strip():
            yield LabeledSentence(line, *heading)


def measure_decision(decision: Decision, half: str) -> Accuracy:
    """Return how often the rule is right on one half of its sentences."""
    pairs = [
        (sentence, sentence.label in decision.positive, decision.decide(sentence))
        for sentence in read_sentences(decision.file, half)
        if sentence.label not in decision.skipped
    ]
    outcomes = [(is_positive, answer) for _, is_positive, answer in pairs]
    return Accuracy(
        outcomes.count((True, True)),
        outcomes.count((False, True)),
        outcomes.count((True, False)),
        outcomes.count((False, False)),
        tuple(sentence for sentence, is_positive, answer in pairs if is_positive != answer),
    )
