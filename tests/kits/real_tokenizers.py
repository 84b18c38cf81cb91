"""The tokenizers of tests/data/tokenizers, as folders and loaded."""

from __future__ import annotations

import json
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
def _small_qwen_json() -> str:
    """Return Qwen3's tokenizer.json with its first merges alone. Special tokens keep their ids."""
    packed = (FOLDER / "qwen3/tokenizer.json.xz").read_bytes()
    stored = json.loads(lzma.decompress(packed))
    model, merges = stored["model"], 4000
    model["merges"] = model["merges"][:merges]
    model["vocab"] = {token: id for token, id in model["vocab"].items() if id < 256 + merges}
    model["vocab"] |= {added["content"]: added["id"] for added in stored["added_tokens"]}
    return json.dumps(stored)


def write_small_qwen(folder: Path) -> Path:
    """Write Qwen3's tokenizer with few merges, which loads at once; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(FOLDER / "qwen3/tokenizer_config.json", folder)
    (folder / "tokenizer.json").write_text(_small_qwen_json(), encoding="utf-8")
    return folder


@cache
def real_tokenizer(name: str) -> Any:
    """Load a tokenizer as a run does. All tests share it, so they must not change it."""
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(write_tokenizer(name, Path(folder)))


@cache
def small_qwen() -> Any:
    """Load the tokenizer of `write_small_qwen`. All tests share it, so they must not change it."""
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(write_small_qwen(Path(folder)))
