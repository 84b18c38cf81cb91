"""A checkpoint saved under transformers 4.57 is the same model under 5, and the other way round."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers import __version__ as here

from scorekit.errors import UserError
from tests.other_transformers import facts, write_checkpoints
from tests.trainer_kit import byte_level_tokenizer, save_policy
from trainer.compat import load_config, save_tokenizer
from trainer.config import PolicyConfig
from trainer.policy import load_policy

ROOT = Path(__file__).parents[2]
OTHER = ROOT / (".venv" if here.startswith("5.") else ".venv-tf5") / "bin" / "python"
needs_other = pytest.mark.skipif(
    not OTHER.exists(), reason=f"no {OTHER.relative_to(ROOT)}: `make setup env-tf5` makes it"
)


def under_the_other(what: str, folder: Path) -> str:
    done = subprocess.run(
        [OTHER, "-m", "tests.other_transformers", what, folder],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_other
def test_a_checkpoint_of_the_other_transformers_is_the_same_model(tmp_path: Path) -> None:
    under_the_other("save", tmp_path)
    theirs = json.loads(under_the_other("read", tmp_path))
    assert sorted(theirs) == ["mistral", "plain", "qwen3"]
    for name, expected in theirs.items():
        found = json.loads(json.dumps(facts(tmp_path / name)))
        assert found["logits"] == pytest.approx(expected.pop("logits"), abs=2e-4), name
        del found["logits"]
        assert found == expected, name


@needs_other
def test_the_other_transformers_reads_ours(tmp_path: Path) -> None:
    write_checkpoints(tmp_path)
    for name, theirs in json.loads(under_the_other("read", tmp_path)).items():
        found = json.loads(json.dumps(facts(tmp_path / name)))
        assert theirs.pop("logits") == pytest.approx(found.pop("logits"), abs=2e-4), name
        assert theirs == found, name


def rewrite_rotary_settings(folder: Path, written: dict) -> None:
    """As 5 writes them."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if not key.startswith("rope_")}
    path.write_text(json.dumps({**config, "rope_parameters": written}), encoding="utf-8")


def test_rotary_settings_that_5_wrote_are_read(tmp_path: Path) -> None:
    save_policy(tmp_path / "a", byte_level_tokenizer(), rope_theta=77.0)
    save_policy(tmp_path / "b", byte_level_tokenizer())
    rewrite_rotary_settings(tmp_path / "b", {"rope_type": "default", "rope_theta": 77.0})
    ids = torch.arange(5, 40)[None]
    logits = [
        load_policy(PolicyConfig(path=str(tmp_path / name)), torch.device("cpu"))[0](ids).logits
        for name in "ab"
    ]
    torch.testing.assert_close(*logits)


@pytest.mark.skipif(here.startswith("5."), reason="5 reads what it wrote")
def test_rotary_settings_that_457_has_no_words_for_are_told(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 400}  # fmt: skip
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
