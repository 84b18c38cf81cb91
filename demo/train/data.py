"""Clean the raw English-Korean rows and split them by source, near-duplicates on one side.

    python -m demo.train.data --ha ha_en_ko.jsonl --pydocs pydocs_en_ko.jsonl --de ha_en_de.jsonl

Writes demo/data/{sft,rl_prompts,dev,heldout,final_test,pydocs,foreign_de}.jsonl. Two sources are
near-duplicates when the Jaccard similarity of their character trigrams is 0.7 or more; a row
that is one of a row in an earlier split (order: heldout, final_test, dev, rl_prompts, sft,
pydocs) is dropped, so no training source resembles an evaluation source.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import defaultdict
from pathlib import Path

from scorekit.command import run_command

DATA = Path(__file__).resolve().parents[1] / "data"
SIZES = {"heldout": 400, "final_test": 400, "dev": 120, "rl_prompts": 3000}
LANGUAGES = {
    "src_lang": "English",
    "tgt_lang": "Korean",
    "src_lang_code": "en-US",
    "tgt_lang_code": "ko-KR",
}
MARKUP = re.compile(r"[{}<>\[\]`*|\\_@#=]|https?:|\n|::|\.\.")
HANGUL = re.compile(r"[가-힣]")


def read_jsonl(path: Path) -> list[dict]:
    """Return rows of a JSONL file."""
    with open(path, encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Write one JSON object per line, with readable non-ASCII."""
    with open(path, "w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def clean(rows: list[dict], max_words: int = 16) -> list[dict]:
    """Keep plain sentences of 2 to ``max_words`` words with a Korean side of a plausible
    length.
    """
    rows_kept, seen = [], set()
    for row in rows:
        src = " ".join(row["src"].split())
        tgt = " ".join(row["tgt"].split())
        key = re.sub(r"\W+", " ", src.lower()).strip()
        if MARKUP.search(src) or MARKUP.search(tgt) or not HANGUL.search(tgt):
            continue
        if not 2 <= len(src.split()) <= max_words or key in seen:
            continue
        if not 0.15 <= len(tgt) / len(src) <= 1.5:
            continue
        seen.add(key)
        rows_kept.append({"id": row["id"], "src_text": src, **LANGUAGES, "ref_text": tgt})
    return rows_kept


def trigrams(text: str) -> set[str]:
    """Return character trigrams of the lower-cased text, padded with spaces."""
    text = f" {text.lower()} "
    return {text[i : i + 3] for i in range(len(text) - 2)}


class NearDuplicates:
    """Index of sources. It answers whether a new source resembles one in it."""

    def __init__(self, threshold: float = 0.7) -> None:
        self.threshold = threshold
        self.sets: list[set[str]] = []
        self.postings: dict[str, list[int]] = defaultdict(list)

    def add(self, text: str) -> None:
        """Put a source into the index."""
        grams = trigrams(text)
        for gram in grams:
            self.postings[gram].append(len(self.sets))
        self.sets.append(grams)

    def resembles(self, text: str) -> bool:
        """Return whether a source in the index is a near-duplicate of `text`."""
        grams = trigrams(text)
        common: dict[int, int] = defaultdict(int)
        for gram in grams:
            for index in self.postings.get(gram, ()):
                common[index] += 1
        return any(
            count / (len(grams) + len(self.sets[index]) - count) >= self.threshold
            for index, count in common.items()
        )


def split(rows: list[dict], seed: int) -> dict[str, list[dict]]:
    """Distribute shuffled rows over the splits.

    A row that resembles a row of an earlier split is dropped.
    """
    random.Random(seed).shuffle(rows)
    splits: dict[str, list[dict]] = {}
    index, position = NearDuplicates(), 0
    for name, size in [*SIZES.items(), ("sft", len(rows))]:
        selected: list[dict] = []
        while position < len(rows) and len(selected) < size:
            row = rows[position]
            position += 1
            if not index.resembles(row["src_text"]):
                selected.append(row)
                if name in ("heldout", "final_test", "dev"):  # no near-duplicates inside either
                    index.add(row["src_text"])
        if name == "rl_prompts":
            for row in selected:
                index.add(row["src_text"])
        splits[name] = selected
    return splits


def foreign(rows: list[dict], sources: set[str], count: int, seed: int) -> list[dict]:
    """Return German translations of training sources: examples of a wrong target language."""
    rows = [
        {"src_text": " ".join(row["src"].split()), "text": " ".join(row["tgt"].split())}
        for row in rows
    ]
    rows = [row for row in rows if row["src_text"] in sources and row["text"] != row["src_text"]]
    random.Random(seed).shuffle(rows)
    return rows[:count]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ha", type=Path, required=True, help="UI strings, src and tgt")
    parser.add_argument("--pydocs", type=Path, required=True, help="Python docs, src and tgt")
    parser.add_argument("--de", type=Path, required=True, help="UI strings in German")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    splits = split(clean(read_jsonl(args.ha)), args.seed)
    index = NearDuplicates()
    for name in SIZES:
        for row in splits[name]:
            index.add(row["src_text"])
    pydocs = clean(read_jsonl(args.pydocs))
    splits["pydocs"] = [row for row in pydocs if not index.resembles(row["src_text"])]
    trained = {row["src_text"] for name in ("sft", "rl_prompts") for row in splits[name]}
    splits["foreign_de"] = foreign(read_jsonl(args.de), trained, 2000, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        write_jsonl(args.out / f"{name}.jsonl", rows)
        print(f"{name}: {len(rows)}")


if __name__ == "__main__":
    run_command(main, stdout="log")
