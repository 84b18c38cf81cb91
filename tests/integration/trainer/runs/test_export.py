"""Check that checkpoints are exported as plain Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from scorekit.config import load_config
from scorekit.digest import digest_files
from scorekit.errors import UserError
from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.runs import byte_level_tokenizer, example, save_policy
from trainer.__main__ import app
from trainer.rl.policy.loading import load_policy
from trainer.rl.policy.tokens import stop_token_ids
from trainer.runs.checkpoints.checkpoint import checkpoints, load_checkpoint
from trainer.runs.checkpoints.export import export_policy
from trainer.translation.config import TranslationConfig
from trainer.translation.train import train_translation

NO_SERVICE = ["reward.w_metricx=0", "reward.w_xcomet_span=0", "reward.no_eos_penalty=5"]


def train(folder: Path, *overrides: str, held_out: bool = True) -> Path:
    """Run two updates that need no service, and return the run directory."""
    if not (folder / "policy").exists():
        save_policy(folder / "policy", byte_level_tokenizer())
    settings = [
        *NO_SERVICE,
        f"policy.path={folder}/policy",
        "generation.prompt_template=source",
        "generation.max_new_tokens=8",
        "rl.num_updates=2",
        "rl.batch_size=4",
        "rl.lr=0.02",
        "misc.device=cpu",
        "misc.threads=1",
        f"misc.run_dir={folder}/out",
        "misc.save_every_n_updates=1",
        *overrides,
    ]
    cfg = load_config(TranslationConfig, None, settings)
    examples = [example(f"Open {n}.", str(n)) for n in range(6)]
    return train_translation(examples[:4], examples[4:] if held_out else [], cfg).run_dir


def greedy(model: Any, tokenizer: Any) -> list[list[int]]:
    """Return the ids that a policy generates after some prompts with transformers' generate()."""
    rows = []
    for text in ("Open 1.", "Save the file.", "파일"):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )
        rows.append(output[0].tolist())
    return rows


@pytest.mark.parametrize("rank", [0, 4])
@float64()
def test_an_export_writes_what_the_trained_policy_writes(tmp_path: Path, rank: int) -> None:
    run_dir = train(tmp_path, f"policy.lora.r={rank}")
    cfg = load_config(TranslationConfig, run_dir / "config.yaml")
    trained, tokenizer = load_policy(cfg.policy, torch.device("cpu"))
    before = greedy(doubled(trained), tokenizer)
    load_checkpoint(checkpoints(run_dir / "checkpoints")[0], trained)

    to = tmp_path / "exported"
    result = CliRunner().invoke(app, ["export", str(run_dir), "--to", str(to)])
    assert result.exit_code == 0, result.output
    assert "(step-000002, float32, " in result.output
    plain = doubled(AutoModelForCausalLM.from_pretrained(to))
    exported_tokenizer = AutoTokenizer.from_pretrained(to)
    assert greedy(plain, exported_tokenizer) == greedy(trained, tokenizer) != before
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert not list(to.glob("adapter*")) and not list(to.glob("*.pt"))
    assert stop_token_ids(plain, exported_tokenizer) == stop_token_ids(trained, tokenizer)
    ids = torch.tensor([exported_tokenizer("Open 1.")["input_ids"]])
    with torch.no_grad():
        # Merged weights are rounded to float32, each by up to 2**-24 of itself: logits, which are
        # below 4, by some times as much.
        tolerance = 100 * 2**-24 if rank else CLOSE
        torch.testing.assert_close(plain(ids).logits, trained(ids).logits, atol=tolerance, rtol=0)


def test_the_best_by_evaluation_can_be_had(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "eval.eval_every_n_updates=1")
    newest, older = checkpoints(run_dir / "checkpoints")
    state = (older / "state.json").read_text()
    (older / "state.json").write_text(state.replace('"reward": -', '"reward": 1'))
    best = export_policy(run_dir, tmp_path / "best", best=True, dtype="float32")
    last = export_policy(run_dir, tmp_path / "last", dtype="bfloat16")
    assert (best, last) == (older, newest)
    for name, dtype in (("best", torch.float32), ("last", torch.bfloat16)):
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            assert {file.get_tensor(key).dtype for key in file.keys()} == {dtype}  # noqa: SIM118


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "policy.lora.r=2")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there exists and is not replaced"):
        export_policy(run_dir, tmp_path / "there", dtype="float32")
    with pytest.raises(UserError, match="no complete checkpoint"):
        export_policy(tmp_path, tmp_path / "new", dtype="float32")
    shutil.rmtree(tmp_path / "policy")
    save_policy(tmp_path / "policy", byte_level_tokenizer(), seed=7)
    with pytest.raises(UserError, match="policy is not what the run started with"):
        export_policy(run_dir, tmp_path / "new", dtype="float32")
    with pytest.raises(UserError, match="no checkpoint with an evaluation"):
        without_evaluation = train(tmp_path, "misc.overwrite=true", held_out=False)
        export_policy(without_evaluation, tmp_path / "new", best=True, dtype="float32")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_version_that_cannot_read_a_checkpoint_says_so(tmp_path: Path) -> None:
    run_dir = train(tmp_path)
    checkpoint = checkpoints(run_dir / "checkpoints")[0]
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "next"'))
    state = json.loads((checkpoint / "state.json").read_text())
    state["versions"]["transformers"] = "9.0.0"
    state["files"][config.name] = [config.stat().st_size, digest_files([config])]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"cannot be loaded: .*transformers 9.0.0 saved it, this"):
        export_policy(run_dir, tmp_path / "new", dtype="float32")
