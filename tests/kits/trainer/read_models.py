"""Compute logits of model folders in another environment: python -m tests.kits.trainer.read_models.

Arguments: a file to write, and folders. The file gets, by folder, the ids of TEXT, their logits
[T, V], and the logits of IDS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

TEXT = "Open the file. 파일을 열고 <|im_end|>"
IDS = list(range(2, 50))


def read_model(folder: Path) -> dict[str, Any]:
    """Return ids and logits of a folder, loaded by the auto classes."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    loads_images = kind.endswith("ForConditionalGeneration")
    loader: Any = (
        transformers.AutoModelForImageTextToText
        if loads_images
        else transformers.AutoModelForCausalLM
    )
    model = loader.from_pretrained(folder, torch_dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    with torch.inference_mode():
        text, spread = (model(torch.tensor([row])).logits[0] for row in (ids, IDS))
    return {"ids": ids, "text": text, "spread": spread, "version": transformers.__version__}


if __name__ == "__main__":
    torch.save({path: read_model(Path(path)) for path in sys.argv[2:]}, sys.argv[1])
