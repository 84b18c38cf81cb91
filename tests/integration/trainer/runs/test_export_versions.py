"""Check that transformers 4 loads exports as transformers 5 does (`make test-oracle`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer.runs.test_export import train
from tests.kits.trainer.images import tiny
from tests.kits.trainer.model_families import FAMILIES, family_model
from tests.kits.trainer.read_models import IDS, read_model
from tests.kits.trainer.roleplay import byte_tokenizer
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy
from tests.kits.trainer.searching.policies import tiny_tokenizer
from trainer.runs.checkpoints.checkpoint import checkpoints
from trainer.runs.checkpoints.export import export_policy, logit_tolerance, write_policy

ROOT = Path(__file__).parents[4]
#: Its transformers is the newest 4, which unbabel-comet requires.
OLDER = ROOT / ".venv-oracle/bin/python"

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not OLDER.exists(), reason="no .venv-oracle: `make env-oracle` makes it"),
]


def read_with_older(result: Path, folders: list[Path]) -> dict[str, Any]:
    """Return the results of `read_model` under transformers 4."""
    subprocess.run(
        [OLDER, "-W", "ignore", "-m", "tests.kits.trainer.read_models", result, *folders],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    return dict(torch.load(result))


def spread_logits(model: Any) -> torch.Tensor:
    """Return the logits [T, V] of IDS."""
    with torch.inference_mode():
        return torch.clone(model(torch.tensor([IDS])).logits[0])


def test_transformers_4_computes_the_logits_of_an_export(tmp_path: Path) -> None:
    """Check families of models, a vision model, an export of a run, and its checkpoint."""
    models: dict[Path, Any] = {}
    logits: dict[Path, torch.Tensor] = {}
    for name in FAMILIES:
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = byte_tokenizer()
        models[folder] = family_model(name, tokenizer)
        logits[folder] = spread_logits(models[folder])
        write_policy(models[folder], tokenizer, folder, torch.float32)
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        folder = tmp_path / kind
        folder.mkdir()
        models[folder] = tiny(kind).float()
        logits[folder] = spread_logits(models[folder])
        write_policy(models[folder], tiny_tokenizer(), folder, torch.float32)
    rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    save_policy(tmp_path / "policy", byte_level_tokenizer(), rope_parameters=rope_parameters)
    run_dir = train(tmp_path, "policy.lora.r=4")
    export_policy(run_dir, tmp_path / "exported", dtype="bfloat16")
    full = train(tmp_path, f"misc.run_dir={tmp_path}/full")
    other_paths = [tmp_path / "exported", checkpoints(full / "checkpoints")[0]]

    older = read_with_older(tmp_path / "older.pt", [*models, *other_paths])
    for path in [*models, *other_paths]:
        result, now = older[str(path)], read_model(path)
        assert result["version"].startswith("4.") and now["version"].startswith("5.")
        assert result["ids"] == now["ids"], path
        if path in logits:
            torch.testing.assert_close(now["spread"], logits[path])
        sizes = models.get(path) or models[tmp_path / "llama 3"]
        for key in ("text", "spread"):
            difference = (result[key] - now[key]).abs().max().item()
            assert difference <= logit_tolerance(now[key], sizes), f"{path.name}: {difference}"
