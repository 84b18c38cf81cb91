"""The tokenizer of a policy, and the ids that end and pad its sequences."""

from __future__ import annotations

from typing import Any

from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.policy.models import check_folder, first_line
from trainer.rl.tokenizer_files import read_tokenizer


def load_tokenizer(cfg: PolicyConfig) -> Any:
    """Return the tokenizer, padding on the left."""
    path = cfg.tokenizer or cfg.path
    if path is not None:
        check_folder(path, "policy.tokenizer" if cfg.tokenizer else "policy.path")
    revision = cfg.revision if cfg.tokenizer is None else None
    try:
        return read_tokenizer(str(path), revision)
    except Exception as error:  # transformers raises many types
        raise UserError(f"policy.tokenizer: cannot load {path!r}: {first_line(error)}") from None


def plain_prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a prompt that no chat template has rendered.

    The tokenizer adds its tokens before the text. A tokenizer made for training (`add_eos_token`)
    also ends a text with EOS; a prompt must not end with it, because the model would begin
    another text.
    """
    ids = list(tokenizer(text)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    starts = range(len(ids) - len(bare) + 1)
    begin = next((n for n in starts if ids[n : n + len(bare)] == bare), len(ids))
    while len(ids) > begin + len(bare) and ids[-1] == tokenizer.eos_token_id:
        del ids[-1]
    return ids


def check_tokenizer(cfg: PolicyConfig, tokenizer: Any, model: nn.Module) -> None:
    """Raise UserError if the tokenizer has ids that the model has no embedding for."""
    highest, rows = _highest_id(tokenizer), embedding_rows(model)
    if highest >= rows:
        raise UserError(
            f"policy.tokenizer: {cfg.tokenizer or cfg.path} has ids up to {highest}, but the model "
            f"in {cfg.path} has {rows} embeddings. Use its own tokenizer, or resize them"
        )


def embedding_rows(model: nn.Module) -> int:
    """Return the number of ids that the model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def _highest_id(tokenizer: Any) -> int:
    """Return the largest of the ids of texts, and of those that end and pad sequences.

    Other special tokens do not count: Gemma 3's text models have no row for the tokenizer's image
    token. If a chat template writes one, `check_prompts` reports it.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    ids = set(tokenizer.get_vocab().values()) - special
    return max(ids | {token_id for token_id in named if token_id is not None}, default=0)


def stop_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the ids that end a turn: the tokenizer's EOS, and the generation config's.

    Chat models end a turn with another token than a document.
    """
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    stops = sorted({token_id for token_id in ids if token_id is not None})
    if not stops:
        raise UserError("policy.path: the model has no end-of-sequence token: it cannot stop")
    return stops


def pad_token_id(model: nn.Module, tokenizer: Any) -> int:
    """Return the id that pads a batch; any id works, because it is masked."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return stop_token_ids(model, tokenizer)[0]
