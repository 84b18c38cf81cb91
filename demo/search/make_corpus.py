"""`python -m demo.search.make_corpus WHEELS`: draws the decks and writes the questions and keys.

WHEELS: a folder of the wheels of demo/search/NOTICE.md. The same bytes come out every time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from demo.search.answer_keys import FINAL_KEYS, KEYS, Key, Spot
from demo.search.decks import draw_all
from demo.search.final_test import decks as final_decks
from demo.search.final_test import questions as final_questions
from demo.search.questions import CorpusQuestion, everything
from demo.search.reading import CORPUS, FINAL_CORPUS
from demo.search.slides import SMALL, Deck, Fact, FactLocation, load_fonts
from demo.search.training_questions import training_questions
from scorekit.command import clean_exit
from scorekit.files import write_atomic

HERE = Path(__file__).parent
TRAIN, HELDOUT = HERE / "questions.jsonl", HERE / "heldout.jsonl"
SMALL_PRINT = "small print"  # the type of questions whose letters are too small on a slide
#: The training questions of phase 2: all of small print, and every n-th of the others.
PHASE2, NTH_OTHER = HERE / "questions_phase2.jsonl", 5
#: Documents of which nothing is asked in any training; but they were looked at while the demo was
#: tuned. On those of the final test, which are in a folder of their own, nothing was.
FINAL_TEST = HERE / "final_test/questions.jsonl"
HELD_OUT = ("life-expectancy", "us-employment", "국가_개요")


def make(wheels: Path, folder: Path = HERE) -> None:
    """Draw both corpora under `folder`, and write questions and keys there."""
    load_fonts(wheels)
    decks = draw_all(_new(folder / CORPUS.relative_to(HERE)), wheels)
    by_hand = list(everything())
    more = training_questions(decks, {question.question for question in by_hand})
    named = [*named_questions("q", by_hand), *named_questions("p", more)]
    files = {
        folder / TRAIN.name: [
            named_question for named_question in named if named_question[1].deck not in HELD_OUT
        ],
        folder / HELDOUT.name: [
            named_question for named_question in named if named_question[1].deck in HELD_OUT
        ],
    }
    write_questions(files, decks)
    lines = (folder / TRAIN.name).read_text(encoding="utf-8").splitlines(keepends=True)
    write_atomic(folder / PHASE2.name, "".join(phase2_lines(lines)))
    write_keys(folder / KEYS.name, [question for _, question in named], decks)
    decks = final_decks.draw_all(_new(folder / FINAL_CORPUS.relative_to(HERE)), wheels)
    named = named_questions("f", final_questions.everything())
    write_questions({folder / FINAL_TEST.relative_to(HERE): named}, decks)
    write_keys(folder / FINAL_KEYS.relative_to(HERE), [question for _, question in named], decks)


def phase2_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines of the training questions that phase 2 learns from, in their order."""
    small = [json.loads(line)["question_type"] == SMALL_PRINT for line in lines]
    other_rows = [number for number, is_small in enumerate(small) if not is_small][::NTH_OTHER]
    return [line for number, line in enumerate(lines) if small[number] or number in other_rows]


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def named_questions(
    letter: str, questions: Iterable[CorpusQuestion]
) -> list[tuple[str, CorpusQuestion]]:
    """Return the questions with their ids: a letter and a number."""
    return [(f"{letter}{number:03}", question) for number, question in enumerate(questions, 1)]


def write_questions(
    files: Mapping[Path, Sequence[tuple[str, CorpusQuestion]]], decks: Sequence[Deck]
) -> None:
    """Write questions with ids to each file, with answer and gold pages from the decks."""
    for path, named in files.items():
        rows = [
            {"id": name} | _row(question, _key(question, decks), decks) for name, question in named
        ]
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_keys(path: Path, questions: Sequence[CorpusQuestion], decks: Sequence[Deck]) -> None:
    """Write the answer keys of questions."""
    keys = (_key(question, decks).model_dump(mode="json") for question in questions)
    lines = [json.dumps(key, ensure_ascii=False) for key in keys]
    write_atomic(path, "[\n" + ",\n".join(lines) + "\n]\n")


def _locations(fact: Fact, decks: Sequence[Deck]) -> list[FactLocation]:
    return [location for deck in decks for location in deck.fact_locations.get(fact, [])]


def _key(question: CorpusQuestion, decks: Sequence[Deck]) -> Key:
    """Return the answer key: all locations of the facts that the question needs."""
    spots = [
        [Spot(page_id=location.page_id, box=location.box) for location in _locations(fact, decks)]
        for fact in question.facts
    ]
    return Key(
        question=question.question,
        how=question.answer_method,
        unit=question.unit,
        labels=question.labels,
        reads=spots,
    )


def _row(question: CorpusQuestion, key: Key, decks: Sequence[Deck]) -> dict[str, Any]:
    """Return a row of the data.

    The gold pages are those of the question's deck. Other pages that have a fact go into
    `alternatives`.
    """
    gold: dict[str, list[str]] = {}
    read, letters = [], []
    for fact in question.facts:
        locations = _locations(fact, decks)
        deck_location = next(
            location
            for location in locations
            if location.page_id.rpartition("_")[0] == question.deck
        )
        read.append(deck_location.text)
        letters.append(deck_location.letters)
        other_pages = dict.fromkeys(
            p.page_id for p in locations if p.page_id != deck_location.page_id
        )
        gold[deck_location.page_id] = [
            p for p in other_pages if p in gold.get(deck_location.page_id, other_pages)
        ]
    return {
        "question": question.question,
        "reference_answer": key.answer(read),
        "file_name": f"{question.deck}.pdf",
        "reference_page": sorted(int(page.rpartition("_")[2]) for page in gold),
        "alternatives": {page: other_pages for page, other_pages in gold.items() if other_pages},
        "question_type": _type(question, min(letters)),
    }


def _type(question: CorpusQuestion, letters: float) -> str:
    """Return the question type by difficulty.

    letters: height of the smallest text to read, in points.
    """
    if letters <= SMALL:
        return SMALL_PRINT
    return "figure" if question.answer_method == "value" else "comparison"


def main(
    wheels: Annotated[Path, typer.Argument(help="Folder of the wheels of NOTICE.md.")],
    folder: Annotated[Path, typer.Option(help="Where it is written to.")] = HERE,
) -> None:
    """Draw the decks of the search demo and write its questions."""
    with clean_exit(stdout="log"):
        make(wheels, folder)


if __name__ == "__main__":
    typer.run(main)
