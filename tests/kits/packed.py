"""Rewrites the zip that torch.save writes, as a hostile or a broken disk would."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path


def rewrite_zip(
    path: Path,
    change: Callable[[str, bytes], bytes] = lambda name, content: content,
    *,
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Write the zip file anew, with `change(name, content)` of each part."""
    with zipfile.ZipFile(path) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, change(name, content))


def break_pickle(path: Path) -> None:
    """Damage the data.pkl of a file of torch.save; the zip itself stays valid."""
    rewrite_zip(
        path,
        lambda name, content: content[:-6] + b"\xff" * 6 if name.endswith("data.pkl") else content,
    )


def pack(path: Path) -> None:
    """Compress all parts of a zip file."""
    rewrite_zip(path, compression=zipfile.ZIP_DEFLATED)
