"""Check a file of torch.save before torch reads it: what it holds must be no larger than the file.

The file is a zip whose parts torch writes uncompressed. torch also unpacks compressed parts: then 2
MB become gigabytes; and of a file that it maps into memory it takes the compressed bytes for
numbers.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from scorekit.errors import UserError

#: Weights that transformers and peft load with torch.load.
_WEIGHTS = ("pytorch_model*.bin", "adapter_model.bin")


def check_torch_file(path: Path) -> None:
    """Raise UserError unless the file can be of torch.save: a zip that is not packed or damaged."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path}: not a checkpoint that torch can load: cut short, a pointer of Git LFS, or in "
            "the format from before torch 1.6 (load it and save it again)"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except Exception as error:  # zipfile raises many types for a damaged list of parts
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{path}: not a checkpoint that torch can load: {reason}") from None
    packed = next((part for part in parts if part.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise UserError(
            f"{path}: {packed.filename!r:.80} in it is compressed, which torch.save never does. "
            "Load a copy that you trust, and save it again with torch.save"
        )
    size, unpacked = path.stat().st_size, sum(part.file_size for part in parts)
    if unpacked > size:
        raise UserError(
            f"{path}: damaged: it has {size} bytes, and its parts {unpacked}. Fetch it again"
        )


def check_weight_files(folder: Path) -> None:
    """Raise UserError if a file of torch.save in a model's folder has packed parts, or is damaged.

    Files of the format from before torch 1.6, which is no zip, are left to torch.
    """
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and zipfile.is_zipfile(path):
                check_torch_file(path)
