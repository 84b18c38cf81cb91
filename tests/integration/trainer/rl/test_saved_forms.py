"""Check that files saved by another transformers version load the same here, and the reverse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.real_tokenizers import NAMES, real_tokenizer, small_qwen, write_tokenizer
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, tiny_llama
from trainer.rl.config import PolicyConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.vllm_weights import save_weights
from trainer.rl.model_files import save_tokenizer
from trainer.rl.policy import load_policy, load_tokenizer

ROOT = Path(__file__).parents[4]
TEXTS = [
    " a",
    "  a b",
    "a  b",
    "\n x",
    "안녕 하세요",
    "ａｂ",
    "<s> x",
    "x</s>y",
    " ",
    "",
    "▁a",
    "a▁b",
]


def rewrite_rotary_settings(folder: Path, theta: float) -> None:
    """Write the rotary settings as transformers 4 did: under a separate key."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    assert config.pop("rope_parameters")["rope_theta"] == theta
    path.write_text(json.dumps({**config, "rope_theta": theta}), encoding="utf-8")


@float64()
def test_rotary_settings_that_transformers_4_wrote_are_read(tmp_path: Path) -> None:
    logits = {}
    ids = torch.arange(5, 40)[None]
    for name, theta in (("new", 77.0), ("old", 77.0), ("other", 78.0)):
        settings = {"rope_type": "default", "rope_theta": theta}
        save_policy(tmp_path / name, byte_level_tokenizer(), rope_parameters=settings)
        if name == "old":
            rewrite_rotary_settings(tmp_path / name, theta)
        model, _ = load_policy(PolicyConfig(path=str(tmp_path / name)), torch.device("cpu"))
        logits[name] = doubled(model)(ids).logits
    torch.testing.assert_close(logits["old"], logits["new"], rtol=0, atol=CLOSE)
    assert (logits["other"] - logits["new"]).abs().max() > 1e-6


def test_weights_for_a_server_can_be_read_by_transformers_4(tmp_path: Path) -> None:
    settings = {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}
    model = tiny_llama(byte_level_tokenizer(), rope_parameters=settings)
    world = DistributedContext(torch.device("cpu"))
    save_weights(model, tmp_path / "update-1", world, adapters=False)
    config = json.loads((tmp_path / "update-1/config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 77.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "name", ["small qwen3", "mistral", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_a_saved_tokenizer_gives_the_ids_of_the_one_that_was_saved(name, tmp_path: Path) -> None:
    tokenizer = small_qwen() if name == "small qwen3" else real_tokenizer(name)
    save_tokenizer(tokenizer, tmp_path)
    reloaded = load_tokenizer(PolicyConfig(path="unused", tokenizer=str(tmp_path)))
    assert [reloaded(text).input_ids for text in TEXTS] == [tokenizer(t).input_ids for t in TEXTS]


POLICIES = ("policy", "roleplay_policy", "search_policy")
MODELS = [*(Path("demo/models") / name for name in POLICIES), *NAMES]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_policys_ids_are_those_of_its_tokenizer_json(model, tmp_path: Path) -> None:
    """Check ids where transformers' class for the model's kind would give other ones."""
    folder = write_tokenizer(model, tmp_path) if isinstance(model, str) else ROOT / model
    lines = (ROOT / "tests/golden/token_ids.jsonl").read_text(encoding="utf-8").splitlines()
    texts = TEXTS + [json.loads(line)["text"] for line in lines]
    tokenizer = load_tokenizer(PolicyConfig(path=str(folder)))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer(text).input_ids for text in texts] == [raw.encode(t).ids for t in texts]
