"""A checkpoint saved under transformers 4.57 is the same model under 5, and the other way round."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers import __version__ as version

from scorekit.errors import UserError
from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.other_transformers import read_checkpoints, write_checkpoints
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy
from trainer.rl.compat import load_config, save_tokenizer
from trainer.rl.config import PolicyConfig
from trainer.rl.policy import load_policy

ROOT = Path(__file__).parents[4]
OTHER = ROOT / (".venv" if version.startswith("5.") else ".venv-tf5") / "bin" / "python"
needs_other = pytest.mark.skipif(
    not OTHER.exists(), reason=f"no {OTHER.relative_to(ROOT)}: `make setup env-tf5` makes it"
)


@needs_other
def test_a_checkpoint_is_the_same_model_under_either_transformers(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_checkpoints(ours)
    done = subprocess.run(
        [OTHER, "-m", "tests.kits.trainer.other_transformers", theirs, ours],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for folder in (ours, theirs):
        there = json.loads(done.stdout)[folder.name]
        here = json.loads(json.dumps(read_checkpoints(folder)))
        assert sorted(here) == sorted(there) == ["mistral", "plain", "qwen3"]
        for name, found in here.items():
            where = f"{folder.name}/{name}"
            logits = pytest.approx(found.pop("logits"), rel=0, abs=CLOSE)
            assert there[name].pop("logits") == logits, where
            assert there[name] == found, where


def rewrite_rotary_settings(folder: Path, written: dict) -> None:
    """As 5 writes them."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if not key.startswith("rope_")}
    path.write_text(json.dumps({**config, "rope_parameters": written}), encoding="utf-8")


@float64()
def test_rotary_settings_that_5_wrote_are_read(tmp_path: Path) -> None:
    save_policy(tmp_path / "a", byte_level_tokenizer(), rope_theta=77.0)
    save_policy(tmp_path / "b", byte_level_tokenizer())
    rewrite_rotary_settings(tmp_path / "b", {"rope_type": "default", "rope_theta": 77.0})
    ids = torch.arange(5, 40)[None]
    models = [
        load_policy(PolicyConfig(path=str(tmp_path / name)), torch.device("cpu"))[0]
        for name in "ab"
    ]
    logits = [doubled(model)(ids).logits for model in models]
    torch.testing.assert_close(*logits, rtol=0, atol=CLOSE)


@pytest.mark.skipif(version.startswith("5."), reason="5 reads what it wrote")
def test_rotary_settings_that_457_has_no_words_for_are_told(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 400,
    }
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    load_config(str(tmp_path))
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    rewrite_rotary_settings(tmp_path, layers)
    with pytest.raises(UserError, match=r"policy\.path: .* load it under transformers 5"):
        load_policy(PolicyConfig(path=str(tmp_path)), torch.device("cpu"))


def test_a_saved_tokenizer_names_a_class_that_both_know(tmp_path: Path) -> None:
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
