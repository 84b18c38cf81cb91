"""Defines the sets that every policy is measured on: questions about documents outside all
trainings.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from demo.search.answer_keys import FINAL_KEYS, KEYS
from demo.search.make_corpus import FINAL_TEST, HELDOUT
from demo.search.reading import CORPUS, FINAL_CORPUS


class MeasuredSet(NamedTuple):
    """A set to measure on. corpora: all that its index has. ending: of the names of its files."""

    title: str
    questions: Path
    corpora: tuple[Path, ...]
    keys: tuple[Path, ...]
    ending: str = ""


#: Whose index is trained on, too: it holds all of the demo's decks but the final test's.
HELD_OUT = "held_out"
#: The one that counts first.
SETS = {
    "final_test": MeasuredSet(
        "final_test", FINAL_TEST, (CORPUS, FINAL_CORPUS), (KEYS, FINAL_KEYS), "_final"
    ),
    HELD_OUT: MeasuredSet("held_out, the development set", HELDOUT, (CORPUS,), (KEYS,)),
}
