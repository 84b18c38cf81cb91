"""unbabel-comet's own `predict`, in its environment (`make env-oracle`), for comparisons.

    .venv-oracle/bin/python -m bench.oracle.predict FOLDER DTYPE
    .venv-oracle/bin/python -m bench.oracle.predict --random SIZE DTYPE DEVICE

reads a list of samples from each line of stdin, and writes their scores as a line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import ROOT
from scorekit.command import run_command
from scorekit.errors import UserError
from scorekit.processes import end_with_parent
from scorekit.scorers import SampleForScoring

_PYTHON = ROOT / ".venv-oracle/bin/python"


class Upstream:
    """A process that predicts with upstream's defaults: batches of 16, sorted by source characters.

    It ends with this object, because it reads from the object's pipe.
    """

    def __init__(self, *arguments: str) -> None:
        """Start the process with the arguments of this module's command line.

        Raises UserError if its environment is missing.
        """
        if not _PYTHON.exists():
            raise UserError(f"{_PYTHON}: missing; `make env-oracle` makes it")
        self._process = subprocess.Popen(
            [_PYTHON, "-W", "ignore", "-m", "bench.oracle.predict", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=end_with_parent(),
        )

    def __call__(self, pairs: Sequence[SampleForScoring]) -> list[float]:
        """Return the scores of one call. Raise UserError if the process has ended, with the
        reason.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        samples = [{"src": pair.src, "mt": pair.mt} for pair in pairs]
        try:
            self._process.stdin.write(json.dumps(samples) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"{_PYTHON} -m bench.oracle.predict has ended: see its message above")
        return [float(score) for score in json.loads(line)]


def _store(folder: str, dtype: str) -> tuple[Any, int]:
    import comet
    import torch

    with contextlib.chdir(folder):  # the stored path of the encoder is relative to it
        model = comet.load_from_checkpoint("checkpoints/model.ckpt", local_files_only=True)
    return model.to(getattr(torch, dtype)), 0


def _random(size: Any, dtype: str, device: str) -> tuple[Any, int]:
    from bench.kit.random_models import folder, random_metric

    def make(path: Path, word_layer: int, hidden_sizes: list[int]) -> Any:
        from comet.models import XCOMETMetric

        return XCOMETMetric(
            encoder_model="XLM-RoBERTa-XL",
            pretrained_model=str(path),
            load_pretrained_weights=False,
            local_files_only=True,
            word_layer=word_layer,
            hidden_sizes=hidden_sizes,
            layer_transformation="softmax",
        )

    metric = random_metric(make, folder("xcomet", size), device, dtype)
    return metric, 0 if device == "cpu" else 1


def _predict(model: Any, gpus: int) -> Callable[[list[dict[str, str]]], list[float]]:
    workers = {"num_workers": 0} if gpus == 0 else {}

    def predict(samples: list[dict[str, str]]) -> list[float]:
        output = model.predict(samples, batch_size=16, gpus=gpus, progress_bar=False, **workers)
        return [float(score) for score in output.scores]

    return predict


def main() -> None:
    """Predict line by line."""
    import torch

    arguments = sys.argv[1:]
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # Lightning's notes, once a call
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Lightning prints is no answer
    random = arguments[0] == "--random"
    model, gpus = _random(*arguments[1:]) if random else _store(*arguments)
    predict = _predict(model, gpus)
    for line in sys.stdin:
        print(json.dumps(predict(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    run_command(main)
