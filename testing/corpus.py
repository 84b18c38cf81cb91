"""Writes small corpora for synthesis runs, and reads what a run exports."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def write_corpus(path: Path, documents: int) -> None:
    """Write documents in MADLAD's format, each with its own sentences."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for i in range(documents):
            lines = [
                f"This is the sentence number {i} of the small corpus, line {k}, and it ends."
                for k in range(3)
            ]
            file.write(json.dumps({"text": "\n".join(lines)}) + "\n")


def export_bytes(out_dir: Path) -> dict[str, bytes]:
    """Return every file of the export."""
    return {
        str(p.relative_to(out_dir / "export")): p.read_bytes()
        for p in sorted((out_dir / "export").rglob("*"))
        if p.is_file()
    }
