"""Runs on TRL that several processes of this CPU share: their start, gradients and lines."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tests.kits import forked
from tests.kits.float64 import CLOSE
from trainer.runs.run_log import read_jsonl

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
#: `python -m trainer` where accelerate shards the weights on CPUs, too.
SHARDED = "tests.kits.trainer.ranks.sharded_trl"
#: Name of a parameter -> its gradient.
Gradients = Mapping[str, Tensor]


def save(cfg: Any) -> str:
    """Write the config of a run beside its folder."""
    path = Path(cfg.misc.run_dir).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(cfg.model_dump(mode="json")), encoding="utf-8")
    return str(path)


def start(cfg: Any, *more: str, processes: int = 2, module: str = "trainer") -> forked.Command:
    """Start a run of several processes.

    more: other options of the command.
    """
    words = (module, "train", "--config", save(cfg), *more)
    return forked.Command(*words, environment=ENVIRONMENT, ranks=processes)


def gradients_of(configs: Sequence[Any], out: Path, processes: int) -> list[Gradients]:
    """Return the gradients of one update of each config.

    out: the file to pass them in.
    """
    words = ("tests.kits.trainer.ranks.trl_update", str(out), *map(save, configs))
    result = forked.completed(*words, environment=ENVIRONMENT, ranks=processes)
    assert result.returncode == 0, result.stderr
    gradients: list[Gradients] = torch.load(out)
    return gradients


def assert_same_gradients(single: Gradients, shared: Gradients, minimum: float) -> None:
    """Check that two updates are one, in float64, and not nothing.

    minimum: what their largest gradient exceeds, far above the tolerance.
    """
    assert single.keys() == shared.keys()
    for name, expected in single.items():
        assert expected.dtype == torch.float64
        torch.testing.assert_close(shared[name], expected, atol=CLOSE, rtol=0)
    assert max(value.abs().max() for value in single.values()) > minimum


def timeless_lines(
    run_dir: Path, name: str, left_out: Collection[str] = ("seconds",)
) -> list[dict[str, Any]]:
    """Return the lines of a file of the run, without times.

    left_out: other keys that are left out.
    """
    return [
        {
            key: value
            for key, value in line.items()
            if not key.endswith("_s") and key not in left_out
        }
        for line in read_jsonl(run_dir / name)
    ]
