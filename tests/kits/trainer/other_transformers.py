"""Checkpoints written and read by another process, under the other transformers.

    python -m tests.kits.trainer.other_transformers THEIRS OURS

writes checkpoints under THEIRS, and prints what `facts` finds in each of them and of those under
OURS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.kits.float64 import doubled, float64
from tests.kits.real_tokenizers import real_tokenizer
from tests.kits.trainer.runs import byte_level_tokenizer
from trainer.rl.config import PolicyConfig
from trainer.rl.policy import load_policy
from trainer.runs.checkpoints.checkpoint import State, save_checkpoint

TEXTS = ["Open the file.", "  파일을 열고\n저장하십시오. 👨‍👩‍👧", "<|im_start|>user\n<s> a"]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rope_theta": 77.0,  # no default: a loader that overlooks it is found out
}


def write_checkpoints(folder: Path) -> None:
    """One for each tokenizer; every weight is tied to another's in the last."""
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    for name, tokenizer, changes in (
        ("qwen3", real_tokenizer("qwen3"), {"tie_word_embeddings": False}),
        ("mistral", real_tokenizer("mistral"), scaled),
        ("plain", byte_level_tokenizer(), {"tie_word_embeddings": True}),
    ):
        torch.manual_seed(0)
        sizes = SIZES | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        if name == "qwen3":
            model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, **changes))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes, **changes))
        save_checkpoint(folder / name, model, tokenizer, {}, State(1, {}))


@torch.no_grad()
@float64()
def facts(folder: Path) -> dict[str, Any]:
    """ids of TEXTS, what they decode to, the chat template, and logits in float64 on fixed ids."""
    model, tokenizer = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    logits = doubled(model)(torch.arange(5, 45)[None]).logits[0, -1, :50]
    return {
        "ids": ids,
        "text": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
        "special": [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id],
        "template": tokenizer.chat_template,
        "logits": logits.tolist(),
    }


def read_checkpoints(folder: Path) -> dict[str, Any]:
    """The facts of each, by name."""
    return {path.name: facts(path) for path in sorted(folder.iterdir())}


if __name__ == "__main__":
    theirs, ours = map(Path, sys.argv[1:])
    write_checkpoints(theirs)
    print(json.dumps({folder.name: read_checkpoints(folder) for folder in (theirs, ours)}))
