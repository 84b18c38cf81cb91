"""TRL's GRPOTrainer with the search environment, a tiny policy, and turns by a script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from trainer.search.environment.trl_tools import TrlSearch
from trainer.search.records import Question

#: Tokens of their own, so that the policy can write a call in few tokens.
_SPECIAL = ("<|pad|>", "<|im_end|>", "<|im_start|>")
_TAG = re.compile(r"<(search|bbox|search_complete)>(.*?)</\1>", re.DOTALL)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte, and the chat template of Qwen3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate([*_SPECIAL, *alphabet])}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    template = resources.files("trl") / "chat_templates/qwen3.jinja"
    wrapped.chat_template = template.read_text(encoding="utf-8")
    return wrapped


def tool_call(turn: str) -> str:
    """Return a turn with tags as a call of a tool; a turn without an action calls none."""
    match = _TAG.search(turn)
    if match is None:
        return "I do not know."
    name, body = match[1], match[2]
    if name == "search":
        call = {"name": "search", "arguments": {"query": body}}
    elif name == "bbox":
        sides = dict(zip(("x1", "y1", "x2", "y2"), json.loads(body), strict=True))
        call = {"name": "crop", "arguments": sides}
    else:
        call = {"name": "search_complete", "arguments": {}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


class ScriptedTrainer(GRPOTrainer):
    """TRL's trainer, whose policy writes the turns of a script. All else is TRL's own.

    script: question -> its turns, as texts of the policy.
    prompts: all texts that the policy got.
    """

    script: Mapping[str, Sequence[str]]
    prompts: list[str]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        completions = []
        for ids in prompt_ids:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            self.prompts.append(text)
            question = next(q for q in self.script if f"Question: {q}<|im_end|>" in text)
            turns = self.script[question]
            number = text.count("<tool_response>")
            written = turns[number] if number < len(turns) else "Done."
            completions.append(self._tokenizer(f"{written}<|im_end|>")["input_ids"])
        return completions, None


def make_search_trainer(
    folder: Path,
    search: TrlSearch,
    questions: Sequence[Question],
    script: Mapping[str, Sequence[str]],
    reward_funcs: Sequence[Any] = (),
    **arguments: Any,
) -> ScriptedTrainer:
    """Return a trainer of these questions and a policy of random weights.

    script: question -> its turns.
    arguments: of GRPOConfig.
    """
    tokens = byte_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=65536,
            bos_token_id=None,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )
    )
    values: dict[str, Any] = {
        "per_device_train_batch_size": 2 * len(questions),
        "num_generations": 2,
        "max_completion_length": 40_000,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = ScriptedTrainer(
        model=model,
        reward_funcs=[search.rewards, *reward_funcs],
        args=GRPOConfig(output_dir=str(folder), **(values | arguments)),
        train_dataset=Dataset.from_list(search.rows(questions)),
        processing_class=tokens,
        environment_factory=search.environment,
    )
    trainer.script, trainer.prompts = script, []
    return trainer
