"""Read the headers of a model's weight files, without the weights."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from scorekit.documents import parse_json
from scorekit.errors import UserError

_LARGEST_HEADER = 100 * 2**20  # the limit of safetensors itself


def count_weights(folder: Path) -> int | None:
    """Return how many numbers the safetensors files of a folder have; None without such files.

    Raises UserError if a file is missing, truncated, or not safetensors.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            names = sorted(
                set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        return sum(_count(folder / name) for name in names) if names else None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: not an index of weight files") from None


def _count(path: Path) -> int:
    """Return how many numbers a file has.

    Format: 8 bytes of length, a JSON header, the data (https://github.com/huggingface/safetensors).
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = file.read(min(length, _LARGEST_HEADER))
    try:
        header: dict[str, Any] = parse_json(text)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        sizes = [end, *(size for entry in header.values() for size in entry["shape"])]
        if not all(isinstance(size, int) and 0 <= size < 2**63 for size in sizes):
            raise ValueError
        count = sum(math.prod(entry["shape"]) for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{path}: not a safetensors file") from None
    size = path.stat().st_size
    if size < 8 + length + end:
        raise UserError(f"{path}: truncated: {size} bytes, but its header needs {8 + length + end}")
    return count
