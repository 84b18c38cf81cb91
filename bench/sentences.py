"""Compare our sentence splitter with libraries, on labelled lines of tests/data.

    pip install sentencex pysbd blingfire     # in any environment; what is missing is left out
    python -m bench.sentences

Precision and recall are those of the ends of sentences inside a line. A line is right if all of its
ends are right. Then the CPU seconds per million characters are measured, for a line of 40,000
characters and for one four times as long. If they grow with the length, the splitter is not linear.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from scorekit.command import run_command
from scorekit.text.sentences import split_sentences

DATA = Path(__file__).parents[1] / "tests/data"
#: Lines of all kinds; and lines with quotations, German abbreviations and ordinals.
FILES = ("sentences.jsonl", "sentences_framed.jsonl")
Split = Callable[[str, str], list[str]]


def splitters() -> dict[str, Split]:
    """Return the installed splitters by name."""
    split_by_name: dict[str, Split] = {
        "scorekit": lambda text, lang: [text[a:b] for a, b in split_sentences(text)]
    }
    for name, make in (("sentencex", _sentencex), ("pysbd", _pysbd), ("blingfire", _blingfire)):
        try:
            split_by_name[name] = make()
        except ImportError:
            print(f"{name}: not installed")
    return split_by_name


def _sentencex() -> Split:
    module = importlib.import_module("sentencex")
    return lambda text, lang: list(module.segment(lang, text))


def _pysbd() -> Split:
    segmenter = importlib.import_module("pysbd").Segmenter
    segmenters = {lang: segmenter(language=lang, clean=False) for lang in ("en", "zh")}
    return lambda text, lang: list(segmenters.get(lang, segmenters["en"]).segment(text))


def _blingfire() -> Split:
    module = importlib.import_module("blingfire")
    return lambda text, lang: module.text_to_sentences(text).split("\n")


def ends(sentences: Iterable[str]) -> set[int]:
    """Return where sentences end, counted in characters without white space; the line's end is
    left out.
    """
    positions, position = set(), 0
    for sentence in sentences:
        position += len("".join(sentence.split()))
        positions.add(position)
    return positions - {position}


def main() -> None:
    """Print a table for each file."""
    for name in FILES:
        print(name)
        compare(DATA / name)


def compare(path: Path) -> None:
    """Print the table of a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    languages = list(dict.fromkeys(row["lang"] for row in rows))
    for name, split in splitters().items():
        for lang in languages:
            language_rows = [row for row in rows if row["lang"] == lang]
            lines = [row["joint"].join(row["sentences"]) for row in language_rows]
            gold = [ends(row["sentences"]) for row in language_rows]
            split_ends = [ends(split(line, lang)) for line in lines]
            right = sum(len(a & b) for a, b in zip(gold, split_ends, strict=True))
            num_right = sum(a == b for a, b in zip(gold, split_ends, strict=True))
            precision = right / max(1, sum(map(len, split_ends)))
            recall = right / sum(map(len, gold))
            speeds = [seconds(split, lang, lines, size) for size in (40_000, 160_000)]
            print(
                f"{name:10} {lang}  precision {precision:.2f}  recall {recall:.2f}  "
                f"lines right {num_right} of {len(language_rows)}  "
                f"s/M chars {speeds[0]:.2f} -> {speeds[1]:.2f}"
            )


def seconds(split: Split, lang: str, lines: list[str], size: int) -> float:
    """Return the CPU seconds per million characters of one line of `size` characters."""
    line = " ".join(lines) + " "
    text = (line * (size // len(line) + 1))[:size]
    started = time.process_time()
    split(text, lang)
    return (time.process_time() - started) * 1e6 / size


if __name__ == "__main__":
    run_command(main, stdout="log")
