"""Export a checkpoint of a run as a plain Hugging Face folder, adapters merged.

The folder gets its name only after it was loaded again and compared with the checkpoint
(trainer/runs/checkpoints/export_check.py).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.files import replacing_folder
from trainer.rl.config import PolicyConfig
from trainer.rl.model_files import save_model
from trainer.rl.policy import load_policy, shared_layers, without_tie_warnings
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    best_checkpoint,
    cannot_load,
    damage_reason,
    newest_checkpoint,
    read_state,
    save_processors,
)
from trainer.runs.checkpoints.export_check import (
    check_logits,
    check_tokenizers,
    check_weights,
    probe_ids,
    probe_logits,
    rounding_noise,
    weight_digests,
)

log = logging.getLogger(__name__)


def export_policy(
    run_dir: Path, to: Path, *, best: bool = False, dtype: Literal["float32", "bfloat16"]
) -> Path:
    """Write model, tokenizer and generation ids into a new folder, and return the checkpoint.

    That is the newest complete one, or the best by evaluation. Adapters are merged in float32
    before the weights become `dtype`. Raises UserError if there is no such checkpoint, if its base
    has changed, or if `to` exists; ScorekitError if the export would be another model.
    """
    if to.exists() or to.is_symlink():
        raise UserError(f"--to: {to} exists and is not replaced. Name another folder")
    checkpoint = _choose(run_dir / "checkpoints", best)
    model, tokenizer = _load(checkpoint, read_state(checkpoint))
    model = _merge(model, probe_ids(model, tokenizer))
    with replacing_folder(to) as folder:
        write_policy(model, tokenizer, folder, getattr(torch, dtype))
    return checkpoint


def write_policy(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a float32 model on the CPU, load it again and compare.

    The weights of `model` are released meanwhile, for memory: it cannot be used afterwards. Raises
    ScorekitError if the folder has another model.
    """
    probes = probe_ids(model, tokenizer)
    _say_if_untied(model)
    _cast(model, dtype)
    save_model(model, folder)
    save_processors(model, tokenizer, folder)
    _cast(model, torch.float32)
    expected, digests = probe_logits(model, probes), weight_digests(model)
    model.to("meta")
    written = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    check_tokenizers((model, tokenizer), written, "writing")
    check_weights(digests, weight_digests(written[0]), "writing")
    check_logits(expected, probe_logits(written[0], probes), model, "writing")


def _merge(model: Any, probes: list[list[int]]) -> nn.Module:
    """Return the plain model. Raises ScorekitError if its logits are others."""
    if not hasattr(model, "merge_and_unload"):
        plain: nn.Module = model
        return plain
    expected = probe_logits(model, probes)
    noise = rounding_noise(model, probes, expected)
    for name in shared_layers(model):
        _untie(model, name)
    with without_tie_warnings():
        merged: nn.Module = model.merge_and_unload()
    check_logits(expected, probe_logits(merged, probes), merged, "merging the adapters", noise)
    return merged


def _untie(model: Any, name: str) -> None:
    """Give a layer with adapters its own copy of a weight that it shares."""
    layer = model.get_base_model().get_submodule(name).base_layer
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def _say_if_untied(model: Any) -> None:
    """Set `tie_word_embeddings` to false if the model's embeddings are not tied.

    Adapters may have untied them. transformers 5 also loads two different weights beside a config
    that ties them, which others would load as one.
    """
    head = model.get_output_embeddings()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Convert the parameters, except those that transformers keeps in float32."""
    float32_modules = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, weight in model.named_parameters():
        stays = any(f".{module}." in f".{name}." for module in float32_modules)
        if weight.is_floating_point() and not stays:
            weight.data = weight.data.to(dtype)


def _choose(folder: Path, best: bool) -> Path:
    checkpoint = best_checkpoint(folder) if best else newest_checkpoint(folder)
    if checkpoint is None:
        description = "checkpoint with an evaluation (data.eval)" if best else "complete checkpoint"
        raise UserError(
            f"{folder}: no {description}. Train a policy first, or name the folder of its run"
        )
    reason = damage_reason(checkpoint)
    if reason is not None:
        raise UserError(f"{checkpoint}: {reason}. Export another (--last)")
    return checkpoint


def _load(checkpoint: Path, state: CheckpointState) -> tuple[Any, Any]:
    """Return the policy in float32 on the CPU, and its saved tokenizer.

    Frozen weights that were rounded to bfloat16 for training are rounded here, too.
    """
    config = PolicyConfig(path=str(checkpoint), tokenizer=str(checkpoint))
    base, adapters = resolve_base_model(config)
    trained = state.config.get("policy", {})
    if adapters is not None:
        base = base.model_copy(update={"weights_dtype": trained.get("weights_dtype", "float32")})
        if trained.get("load_in_4bit"):
            log.warning(
                "%s was trained on weights of 4 bits. Its adapters are merged into the weights "
                "before that rounding, so the export differs a little from what was evaluated",
                checkpoint,
            )
    try:
        model, tokenizer = load_on_base(base, adapters, torch.device("cpu"))
    except UserError as error:
        raise UserError(f"{checkpoint}: {cannot_load(state, error)}") from None
    _cast(model, torch.float32)
    return model, tokenizer
