"""The tokenizers of tests/data/tokenizers, as folders and loaded."""

from __future__ import annotations

import lzma
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

FOLDER = Path(__file__).parents[1] / "data" / "tokenizers"
#: qwen3: byte-level BPE. mistral: sentencepiece with byte fallback, in Llama's form.
NAMES = ("qwen3", "mistral")


def write_tokenizer(name: str, folder: Path) -> Path:
    """Write the tokenizer as its makers publish it; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(FOLDER / name / "tokenizer_config.json", folder)
    packed = (FOLDER / name / "tokenizer.json.xz").read_bytes()
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed))
    return folder


@cache
def real_tokenizer(name: str) -> Any:
    """Load a tokenizer as a run does. All tests share it, so they must not change it."""
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(write_tokenizer(name, Path(folder)))
