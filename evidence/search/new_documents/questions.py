"""Draws 320 questions about the documents of the final test: `questions.jsonl` and `keys.json`.

    python -m evidence.search.new_documents.questions WHEELS

The 52 questions of the demo's final test are too few to tell two policies apart. These come from
the same generator as those of training: every phrase with every fact, drawn by a seed. None of
them is one of the 52. WHEELS: a folder of the wheels of demo/search/NOTICE.md. The same bytes come
out every time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from demo.search.final_test.decks import draw_all
from demo.search.final_test.questions import everything
from demo.search.make_corpus import named_questions, write_keys, write_questions
from demo.search.slides import load_fonts
from demo.search.training_questions import Family, questions_of
from scorekit.command import clean_exit

HERE = Path(__file__).parent
QUESTIONS, KEYS = HERE / "questions.jsonl", HERE / "keys.json"
_WHEAT, _AIRFIELDS, _HOURS = "wheat-and-wages", "airfields", "샌프란시스코_기온"
_KOREAN_HOURS: Final = {
    "mean 0": "자정에는",
    "mean 3": "새벽 세 시에는",
    "mean 6": "아침 여섯 시에는",
    "mean 9": "오전 아홉 시에는",
    "mean 12": "한낮에는",
    "mean 15": "오후 세 시에는",
    "mean 18": "저녁 여섯 시에는",
    "mean 21": "밤 아홉 시에는",
}


def families() -> list[Family]:
    """Return the families of questions: 105 on wheat, 120 on airfields, 95 on temperatures."""
    result = [
        Family(30, _WHEAT, "wheat", " shillings", (
            "What did a quarter of grain cost the English in {y}?",
            "How many shillings went for a quarter of bread corn in England in {y}?",
            "In {y}, at how many shillings did grain stand in England?",
        )),
        Family(30, _WHEAT, "wage", " shillings", (
            "What did a skilled hand in England bring home for seven days in {y}?",
            "In {y}, how many shillings a week was a craftsman in England paid?",
            "How much was a week of skilled toil worth in England in {y}?",
        )),
        Family(25, _WHEAT, "weeks", " weeks", (
            "In {y}, how many weeks did a craftsman in England toil for a quarter of grain?",
            "How many weeks of pay did a quarter of bread corn eat up in England in {y}?",
        )),
        Family(20, _WHEAT, "pounds", " pounds", (
            "How many pounds did a craftsman in England bring home in the whole of {y}?",
            "In {y}, what did a skilled hand in England make from January to December?",
        )),
        Family(30, _AIRFIELDS, "airfields", " airfields", (
            "How many landing strips are listed for {c}?",
            "On how many strips can a pilot touch down in {c}?",
            "What number of places to land does {c} have?",
        )),
        Family(15, _AIRFIELDS, "north", " degrees north", (
            "How far up does the last landing strip of {c} lie, in degrees?",
            "Which latitude has the uppermost strip of {c}?",
        )),
        Family(15, _AIRFIELDS, "south", " degrees north", (
            "How far down does the last landing strip of {c} lie, in degrees?",
            "Which latitude has the lowermost strip of {c}?",
        )),
        Family(15, _AIRFIELDS, "west", " degrees west", (
            "Which longitude has the leftmost strip of {c} on a map?",
            "How far to the left can a pilot land in {c}, in degrees?",
        )),
        Family(15, _AIRFIELDS, "east", " degrees west", (
            "Which longitude has the rightmost strip of {c} on a map?",
            "How far to the right can a pilot land in {c}, in degrees?",
        )),
        Family(15, _AIRFIELDS, "north town", "", (
            "Which place lies by the uppermost landing strip of {c}?",
            "What is the place near the strip of {c} that lies furthest up?",
        )),
        Family(15, _AIRFIELDS, "west town", "", (
            "Which place lies by the leftmost landing strip of {c}?",
            "What is the place near the strip of {c} that lies furthest left?",
        )),
    ]  # fmt: skip
    result += [
        Family(5, _HOURS, measure, "도", (
            f"샌프란시스코의 {{y}}월 {hour} 보통 몇 도인가요?",
            f"{{y}}월 {hour} 샌프란시스코가 대개 몇 도쯤 되나요?",
        ))
        for measure, hour in _KOREAN_HOURS.items()
    ]  # fmt: skip
    for hour, called in (("0", "자정이"), ("6", "아침 여섯 시가"), ("18", "저녁 여섯 시가")):
        result.append(
            Family(5, _HOURS, f"lowest {hour}", "도", (
                f"샌프란시스코의 {{y}}월 {called} 가장 쌀쌀한 날에는 몇 도였나요?",
            ))
        )  # fmt: skip
        result.append(
            Family(5, _HOURS, f"highest {hour}", "도", (
                f"샌프란시스코의 {{y}}월 {called} 가장 따뜻한 날에는 몇 도였나요?",
            ))
        )  # fmt: skip
    result += [
        Family(7, _HOURS, "highest", "도", (
            "샌프란시스코는 {y}월에 아무리 더워도 몇 도까지였나요?",
        )),
        Family(6, _HOURS, "lowest", "도", (
            "샌프란시스코는 {y}월에 아무리 추워도 몇 도까지였나요?",
        )),
        Family(6, _HOURS, "above 60", "시간", (
            "샌프란시스코의 {y}월에는 60도보다 따뜻한 때가 몇 시간이었나요?",
        )),
        Family(6, _HOURS, "above 55", "시간", (
            "샌프란시스코의 {y}월에는 55도보다 따뜻한 때가 몇 시간이었나요?",
        )),
    ]  # fmt: skip
    return result


def make(wheels: Path, folder: Path = HERE) -> None:
    """Draw the questions and write them to a folder with their answer keys."""
    load_fonts(wheels)
    with tempfile.TemporaryDirectory() as pdfs:
        decks = draw_all(Path(pdfs), wheels)
    existing = {question.question for question in everything()}
    named = named_questions("n", questions_of(families(), decks, existing))
    write_questions({folder / QUESTIONS.name: named}, decks)
    write_keys(folder / KEYS.name, [question for _, question in named], decks)


def main(
    wheels: Annotated[Path, typer.Argument(help="Folder of the wheels of NOTICE.md.")],
    folder: Annotated[Path, typer.Option(help="Where it is written to.")] = HERE,
) -> None:
    """Draw the questions of search's evidence."""
    with clean_exit(stdout="log"):
        make(wheels, folder)


if __name__ == "__main__":
    typer.run(main)
