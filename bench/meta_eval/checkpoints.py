"""Makes copies of the demo's checkpoints with random matrices, and one of another class."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from bench.common import ROOT

_DEMO = ROOT / "demo/models"


def metricx_twin(folder: Path) -> Path:
    """Write a copy of the demo's MetricX with random matrices; return `folder`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(_DEMO / "metricx", folder)
    file = folder / "model.safetensors"
    save_file(_drawn_anew(load_file(file)), file, metadata={"format": "pt"})
    return folder


def xcomet_twin(folder: Path) -> Path:
    """Write a copy of the demo's xCOMET with random matrices; return `folder`."""
    import torch

    shutil.copytree(_DEMO / "xcomet", folder)
    file = folder / "checkpoints/model.ckpt"
    stored = torch.load(file, weights_only=False)
    stored["state_dict"] = _drawn_anew(stored["state_dict"])
    torch.save(stored, file)
    return folder


def random_kiwi(folder: Path) -> Path:
    """Write a CometKiwi (`unified_metric`) with random weights and the demo's tokenizer; return
    `folder`.
    """
    from testing.checkpoints.xcomet import QE, build_checkpoint

    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    encoder = _DEMO / "xcomet/encoder"
    hparams: dict[str, Any] = {"input_segments": ["mt", "src"], "word_level_training": False}
    return build_checkpoint(
        folder, encoder, QE[:64], seed=1, kind="unified_metric", hparams=hparams
    )


def _drawn_anew(weights: dict[str, Any]) -> dict[str, Any]:
    """Replace matrices by normal random numbers of the same mean and standard deviation.

    Vectors (biases, norms) stay as they are.
    """
    import torch

    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.empty_like(w).normal_(float(w.mean()), float(w.std()), generator=draw)
        if w.ndim == 2 and w.is_floating_point()
        else w
        for name, w in weights.items()
    }
