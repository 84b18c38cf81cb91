"""Read the images of `python -m bench.generator_images` with an OCR model (PP-OCRv4).

It tells the share of the figures in small print that the model reads at their place. It runs in an
environment of its own, since this project does not need the model:

    uv venv /tmp/ocr && uv pip install --python /tmp/ocr/bin/python rapidocr-onnxruntime
    /tmp/ocr/bin/python bench/generator_images/read_text.py runs/bench/generator_images/small_print
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Read all images of a folder and write its `read.json`."""
    folder, model = Path(sys.argv[1]), import_module("rapidocr_onnxruntime").RapidOCR()
    counts: dict[str, list[int]] = {}
    for row in json.loads((folder / "images.json").read_text(encoding="utf-8")):
        lines = _lines(model, folder / row["image"], row["region"])
        count = counts.setdefault(row["side"], [0, 0])
        count[0] += sum(_is_read(item, lines) for item in row["texts"])
        count[1] += len(row["texts"])
    for side, (num_read, total) in counts.items():
        print(f"{side}: {num_read} of {total} figures, {num_read / total:.1%}")
    (folder / "read.json").write_text(json.dumps(counts), encoding="utf-8")


def _lines(model: Any, path: Path, region: list[float]) -> list[tuple[list[float], str]]:
    """Return the lines of an image: a box in points of the page, and a text."""
    from PIL import Image

    with Image.open(path) as image:
        scale = (region[2] - region[0]) / image.width
    results, _ = model(str(path))
    lines = []
    for corners, text, _ in results or []:
        xs, ys = [x for x, _ in corners], [y for _, y in corners]
        box = [
            region[0] + min(xs) * scale,
            region[1] + min(ys) * scale,
            region[0] + max(xs) * scale,
            region[1] + max(ys) * scale,
        ]
        lines.append((box, text))
    return lines


def _is_read(item: dict[str, Any], lines: list[tuple[list[float], str]]) -> bool:
    """Return whether a line around the middle of a text contains its digits and marks.

    Blanks do not count, and a comma is as good as a point.
    """
    x, y = (item["box"][0] + item["box"][2]) / 2, (item["box"][1] + item["box"][3]) / 2
    return any(
        box[0] <= x <= box[2] and box[1] <= y <= box[3] and _plain(item["text"]) in _plain(text)
        for box, text in lines
    )


def _plain(text: str) -> str:
    return text.replace(" ", "").replace(",", ".")


if __name__ == "__main__":
    main()
