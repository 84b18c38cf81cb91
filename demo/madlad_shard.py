"""MADLAD-400-shaped shards of the real text in demo/data.

A document is a run of consecutive lines of the Python documentation, with a blank line after every
fourth. Its origin and licence stand in demo/data/NOTICE.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Literal

from scorekit.command import run_command

DATA = Path(__file__).parent / "data/pydocs.jsonl"
#: Lines of a document, and of a paragraph in it.
LINES, PARAGRAPH = 16, 4
_FIELDS = {"en": "src_text", "ko": "ref_text"}


def documents(lang: Literal["en", "ko"], first: int = 0, count: int | None = None) -> list[str]:
    """Return documents `first` to `first + count` of the Python documentation."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    lines = [row[_FIELDS[lang]] for row in rows]
    runs = [lines[start : start + LINES] for start in range(0, len(lines), LINES)]
    chosen = runs[first:] if count is None else runs[first : first + count]
    return [
        "\n\n".join(
            "\n".join(run[start : start + PARAGRAPH]) for start in range(0, len(run), PARAGRAPH)
        )
        for run in chosen
    ]


def write_shard(
    root: Path,
    texts: list[str],
    *,
    lang: str,
    split: str = "clean",
    layout: str = "v1",
    index: int = 0,
    newlines: str = "real",
    num_shards: int = 10,
) -> Path:
    """Write one shard where MADLAD-400 has it under its root; the same bytes for the same texts."""
    if layout == "v1":
        path = root / "data" / lang / f"{lang}_{split}_{index:04d}.jsonl.gz"
    else:
        path = (
            root / "data-v1p5" / lang / f"{split}_docs_v2-{index:05d}-of-{num_shards:05d}.jsonl.gz"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, text in enumerate(texts):
        record = {"text": text.replace("\n", "\\n") if newlines == "escaped" else text}
        if layout == "v1.5":
            record["url"] = f"https://docs.python.org/{number}"
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return path


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="folder that becomes the root of the dataset")
    parser.add_argument("--lang", choices=list(_FIELDS), default="en")
    options = parser.parse_args()
    print(write_shard(options.root, documents(options.lang), lang=options.lang))


if __name__ == "__main__":
    run_command(main)
