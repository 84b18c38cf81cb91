"""The policy: loading it, its tokenizer, and the reference that it is held to."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.config import MiscConfig, PolicyConfig

log = logging.getLogger(__name__)


def pick_device(name: str) -> torch.device:
    """`auto`: a GPU where there is one. Raises UserError on a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"misc.device: {name!r}: {str(error).splitlines()[0]}") from None
    return device


def prepare_torch(cfg: MiscConfig) -> torch.device:
    """Set the threads and pick the device."""
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    return pick_device(cfg.device)


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Arithmetic in `dtype`; weights, log-probabilities and optimiser state stay float32."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def load_policy(cfg: PolicyConfig, device: torch.device) -> tuple[nn.Module, Any]:
    """(model, tokenizer) of `cfg.path`, weights in float32, dropout off.

    Raises UserError that names the key and the path, also where the tokenizer has ids that the
    model has no embedding for.
    """
    if cfg.path is None:
        raise UserError("policy.path is not set: give the folder or hub id of a causal LM")
    model = _load_model(cfg.path, cfg.revision, "policy.path").to(device)
    tokenizer = load_tokenizer(cfg)
    highest, rows = _highest_id(tokenizer), embedding_rows(model)
    if highest >= rows:
        raise UserError(
            f"policy.tokenizer: {cfg.tokenizer or cfg.path} has ids up to {highest}, but the model "
            f"in {cfg.path} has {rows} embeddings: use its own tokenizer, or resize them"
        )
    return model, tokenizer


def embedding_rows(model: nn.Module) -> int:
    """Ids that the model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def _highest_id(tokenizer: Any) -> int:
    """Of the ids that text becomes and those that end and fill up sequences.

    Other special tokens do not count: Gemma 3's text models have no row for the tokenizer's image
    token. Where a chat template writes one, `check_prompts` tells.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    ids = set(tokenizer.get_vocab().values()) - special
    return max(ids | {token_id for token_id in named if token_id is not None}, default=0)


class Reference:
    """The frozen model that the policy is held to: `reference_path`, or the policy as it was."""

    def __init__(self, cfg: PolicyConfig, policy: nn.Module, device: torch.device) -> None:
        if cfg.reference_path is None:
            model = copy.deepcopy(policy)
        else:
            model = _load_model(cfg.reference_path, None, "policy.reference_path").to(device)
        self._model = model.requires_grad_(False).eval()

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The model that gives the reference's log-probabilities, within."""
        yield self._model


def load_tokenizer(cfg: PolicyConfig) -> Any:
    """The tokenizer, padding on the left."""
    from transformers import AutoTokenizer

    path = cfg.tokenizer or cfg.path
    revision = cfg.revision if cfg.tokenizer is None else None
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, padding_side="left")
    except Exception as error:  # transformers raises half a dozen kinds
        raise UserError(f"policy.tokenizer: cannot load {path!r}: {_first_line(error)}") from None


def _load_model(path: str, revision: str | None, key: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise UserError(f"{key}: {path}: no such folder")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # transformers raises half a dozen kinds
        raise UserError(f"{key}: cannot load {path!r}: {_first_line(error)}") from None
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"{key}: {path}: {len(missing)} weights are missing, {missing[0]} first; "
            "they would be random"
        )
    _keep_ids_only(model)
    return model.eval()


def _keep_ids_only(model: Any) -> None:
    """Leave of the model's generation settings the ids that end, fill up and begin sequences.

    Nothing else of them is used; and transformers refuses to save many that it loads, such as
    a temperature beside `do_sample: false`, which would be found out when the run is over.
    """
    from transformers import GenerationConfig

    theirs = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )
    # `save_pretrained` moves what stands in config.json into the generation config
    for name in model.config._get_non_default_generation_parameters():
        setattr(model.config, name, None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def unwrapped(model: Any) -> Any:
    """The model itself, out of what spreads it over processes."""
    return getattr(model, "module", model)


def stop_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Ids that end a turn: the tokenizer's EOS and those that the model's generation config names
    (chat models end a turn by another token than a document)."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    stops = sorted({token_id for token_id in ids if token_id is not None})
    if not stops:
        raise UserError("the policy has no end-of-sequence token: it could never learn to stop")
    return stops


def pad_token_id(model: nn.Module, tokenizer: Any) -> int:
    """The id that fills up a batch; any will do, since it is masked."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return stop_token_ids(model, tokenizer)[0]
