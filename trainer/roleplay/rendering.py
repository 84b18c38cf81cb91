"""The policy's tokenizer, and prompts rendered as the policy reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig
from trainer.chat.render import render, use_template
from trainer.rl.policy.tokens import load_tokenizer
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.turn import Message
from trainer.runs.checkpoints.adapters import resolve_base_model


def open_tokenizer(cfg: RoleplayConfig) -> Any:
    """Return the policy's tokenizer, with the config's template. Raises UserError."""
    if cfg.policy.path is None:
        raise UserError("policy.path: required. Set the folder or hub id of a causal LM")
    base, _ = resolve_base_model(cfg.policy)  # adapters without a tokenizer use their base model's
    tokenizer = use_template(load_tokenizer(base), cfg.chat)
    # The inputs of a decoder; `generate` refuses others, and a folder may not define them
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def rendered_prompt(tokenizer: Any, prompt: Sequence[Message], chat: ChatConfig) -> str:
    """Return the text that a reply is sampled after. Raises UserError if the template refuses
    it."""
    return render(tokenizer, prompt, chat, generation_prompt=True)


def prompt_tokens(tokenizer: Any, prompt: Sequence[Message], chat: ChatConfig) -> int:
    """Return the number of tokens of the rendered prompt."""
    text = rendered_prompt(tokenizer, prompt, chat)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
