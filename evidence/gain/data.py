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
from pathlib import Path

from demo.train.data import DATA, LANGUAGES, MARKUP, NearDuplicates, read_jsonl, write_jsonl
from scorekit.command import run_command

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
#: The files whose sources measure; no prompt resembles one of them.
MEASURED = ("heldout", "final_test", "dev")
#: Sources of heldout.jsonl that are trained on without their references: these then measure the
#: gain on the training prompts. The others are for development.
TRACKED = 200


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


def write_sets(folder: Path, num_prompts: int, limit: int | None = None) -> dict[str, int]:
    """Write train.jsonl, tracked.jsonl, development.jsonl and test.jsonl; return their sizes.

    num_prompts: sources to train on, the tracked ones among them.
    limit: rows of each set at most.
    """
    held_out, dev, test = (
        read_jsonl(DATA / f"{n}.jsonl") for n in ("heldout", "dev", "final_test")
    )
    tracked, development = split_held_out(held_out, dev, TRACKED)
    tracked, development, test = (rows[:limit] for rows in (tracked, development, test))
    sources = [row["src_text"] for row in read_jsonl(PROMPTS)]
    random.Random(1).shuffle(sources)
    sources = sources[: max(0, num_prompts - len(tracked))]
    rows = [{"id": f"prompt-{i:05d}", "src_text": s, **LANGUAGES} for i, s in enumerate(sources)]
    rows += [{k: v for k, v in row.items() if k != "ref_text"} for row in tracked]
    random.Random(2).shuffle(rows)
    sets = {"train": rows, "tracked": tracked, "development": development, "test": test}
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
