"""Sources for RL that no model has seen a translation of, and the sets that measure.

    python -m evidence.gain.data --raw ha_en_es.jsonl ha_en_de.jsonl

The raw files hold user-interface strings in English with a translation into another language
(demo/data/NOTICE.md names their origin). Those that no file of demo/data translates into Korean
are written to prompts.jsonl. Near-duplicates of a measured source are left out.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.train.data import (
    DATA,
    HANGUL,
    LANGUAGES,
    MARKUP,
    NearDuplicates,
    read_jsonl,
    write_jsonl,
)
from demo.train.examples import LATIN
from scorekit.command import run_command

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
#: The files whose sources measure; no prompt resembles one of them.
MEASURED = ("heldout", "final_test", "dev")
#: All sets of demo/data, those that measure first.
SETS = ("final_test", "heldout", "dev", "rl_prompts", "sft", "pydocs")
#: Sources of heldout.jsonl that are trained on without their references: these then measure the
#: gain on the training prompts. The others are for development.
TRACKED = 200
#: Of a reversed direction: rows at the end of rl_prompts.jsonl that policies train on, since
#: PROMPTS has no Korean. The metrics learn from the others.
REVERSED_PROMPTS = 300


@dataclass(frozen=True, slots=True)
class Direction:
    """Says which side of demo/data is translated.

    name: of its files. pair: its languages, as the services and BLEU name them.
    is_reversed: whether references are the sources.
    untranslated: matches letters of the source's script.
    """

    name: str
    title: str
    pair: str
    is_reversed: bool
    untranslated: re.Pattern[str]

    @property
    def suffix(self) -> str:
        """Return what its folders end with: nothing for the direction of demo/data."""
        return f"-{self.name}" if self.is_reversed else ""


DIRECTIONS = {
    "en-ko": Direction("en-ko", "English to Korean", "en-US>ko-KR", False, LATIN),
    "ko-en": Direction("ko-en", "Korean to English", "ko-KR>en-US", True, HANGUL),
}


def reverse(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with source and reference, and their languages, exchanged."""
    return {
        "id": row["id"],
        "src_text": row["ref_text"],
        "src_lang": row["tgt_lang"],
        "tgt_lang": row["src_lang"],
        "src_lang_code": row["tgt_lang_code"],
        "tgt_lang_code": row["src_lang_code"],
        "ref_text": row["src_text"],
    }


def read_rows(direction: Direction) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each set of demo/data by its name.

    demo/data keeps near-duplicates of English sources apart. Reversed rows are parted again: a row
    whose source resembles one of an earlier set of SETS is left out.
    """
    rows = {name: read_jsonl(DATA / f"{name}.jsonl") for name in SETS}
    if not direction.is_reversed:
        return rows
    index, parted = NearDuplicates(), dict[str, list[dict[str, Any]]]()
    for name in SETS:
        reversed_rows = [reverse(row) for row in rows[name]]
        parted[name] = [row for row in reversed_rows if not index.resembles(row["src_text"])]
        for row in parted[name]:
            index.add(row["src_text"])
    return parted


def metric_rows(direction: Direction, rows: dict[str, list[dict[str, Any]]]) -> list[dict]:
    """Return the rows whose sources the metrics learn from. No policy trains on them."""
    all_rows = rows["rl_prompts"]
    if not direction.is_reversed:
        return all_rows
    prompts = {key_of(row["src_text"]) for row in all_rows[-REVERSED_PROMPTS:]}
    return [row for row in all_rows if key_of(row["src_text"]) not in prompts]


def key_of(text: str) -> str:
    """Return a text without case and punctuation."""
    return re.sub(r"\W+", " ", text.lower()).strip()


def new_sources(
    texts: Iterable[str], excluded: Iterable[str], measured: Iterable[str], max_words: int = 16
) -> list[str]:
    """Return plain sources of 2 to `max_words` words, each once, in their order.

    excluded: sources that are left out.
    measured: sources whose near-duplicates are left out, too.
    """
    index, out = NearDuplicates(), list[str]()
    for text in measured:
        index.add(text)
    seen = {key_of(text) for text in excluded}
    for text in texts:
        source = " ".join(text.split())
        key = key_of(source)
        is_plain = not MARKUP.search(source) and 2 <= len(source.split()) <= max_words
        if is_plain and key not in seen and not index.resembles(source):
            out.append(source)
        seen.add(key)
    return out


def split_held_out(
    held_out: Sequence[dict], dev: Sequence[dict], tracked: int
) -> tuple[list[dict], list[dict]]:
    """Return the rows that measure the gain on training prompts, and those for development."""
    return list(held_out[:tracked]), [*held_out[tracked:], *dev]


def write_sets(
    folder: Path, direction: Direction, num_prompts: int, limit: int | None = None
) -> dict[str, int]:
    """Write what is trained on and what measures; return the number of rows of each file.

    The files: train.jsonl, tracked.jsonl, development.jsonl, test.jsonl, and pairs.jsonl for SFT.

    num_prompts: sources to train on, the tracked ones among them.
    limit: rows of each set at most.
    """
    all_rows = read_rows(direction)
    tracked, development = split_held_out(all_rows["heldout"], all_rows["dev"], TRACKED)
    test = all_rows["final_test"]
    tracked, development, test = (rows[:limit] for rows in (tracked, development, test))
    if direction.is_reversed:
        new = all_rows["rl_prompts"][-REVERSED_PROMPTS:]
    else:
        sources = [row["src_text"] for row in read_jsonl(PROMPTS)]
        random.Random(1).shuffle(sources)
        new = [
            {"id": f"prompt-{i:05d}", "src_text": source, **LANGUAGES}
            for i, source in enumerate(sources)
        ]
    prompts = [*new[: max(0, num_prompts - len(tracked))], *tracked]
    train = [{k: v for k, v in row.items() if k != "ref_text"} for row in prompts]
    random.Random(2).shuffle(train)
    pairs = [*all_rows["sft"], *all_rows["pydocs"]]
    sets = {"train": train, "tracked": tracked, "development": development, "test": test}
    sets["pairs"] = pairs
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in sets.items():
        write_jsonl(folder / f"{name}.jsonl", lines)
    return {name: len(lines) for name, lines in sets.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=Path, nargs="+", required=True, help="rows with `src`")
    parser.add_argument("--out", type=Path, default=PROMPTS)
    args = parser.parse_args()
    names = ("sft", "rl_prompts", *MEASURED)
    excluded = [row["src_text"] for name in names for row in read_jsonl(DATA / f"{name}.jsonl")]
    measured = [row["src_text"] for name in MEASURED for row in read_jsonl(DATA / f"{name}.jsonl")]
    texts = [row["src"] for path in args.raw for row in read_jsonl(path)]
    sources = new_sources(texts, excluded, measured)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out, [{"src_text": source} for source in sources])
    print(f"{len(sources)} sources")


if __name__ == "__main__":
    run_command(main, stdout="log")
