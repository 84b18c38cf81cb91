"""Loading a model from a folder or the hub, with checks that name the config key."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.hub import hide_short_progress
from scorekit.torch_files import check_weight_files
from trainer.rl.config import PolicyConfig


def check_4bit(cfg: PolicyConfig) -> None:
    """Raise UserError if the policy is to be loaded in 4 bits and bitsandbytes is not installed."""
    if cfg.load_in_4bit and find_spec("bitsandbytes") is None:
        raise UserError(
            "policy.load_in_4bit needs bitsandbytes: `pip install bitsandbytes`, or leave it out"
        )


def check_folder(path: str, key: str) -> None:
    """Raise UserError if a path is no folder, and cannot be a name on the hub."""
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        raise UserError(f"{key}: {path}: no such folder")


def holds_adapters(path: str) -> bool:
    """Return whether a folder has adapters without their base model."""
    folder = Path(path)
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def check_has_base_model(path: str, key: str) -> None:
    """Raise UserError if a folder has adapters without their base model."""
    if holds_adapters(path):
        raise UserError(
            f"{key}: {path} has adapters only. Merge them into their model first (python -m "
            "trainer export RUN_DIR --to FOLDER), and name that folder"
        )


def load_model(
    cfg: PolicyConfig, path: str, revision: str | None, key: str, device: torch.device
) -> nn.Module:
    """Return the model of `path` on `device`, with weights in the data type of `cfg`."""
    hide_short_progress()
    options: dict[str, Any] = {"dtype": getattr(torch, cfg.weights_dtype)}
    if cfg.load_in_4bit:
        options |= _in_4bit(cfg, device)
    config = read_config(path, revision, key)
    check_weight_files(Path(path))
    try:
        model, loading = model_class(config).from_pretrained(
            path,
            config=config,
            revision=revision,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers raises many types
        raise UserError(f"{key}: cannot load {path!r}: {first_line(error)}") from None
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"{key}: {path}: {len(missing)} weights are missing, {missing[0]} first. "
            "They would be random"
        )
    _keep_ids_only(model)
    if cfg.load_in_4bit:  # already loaded onto its device
        _keep_gradients(model)
    else:
        model = model.to(device)
    return model.eval()


def read_config(path: str, revision: str | None, key: str) -> Any:
    from transformers import AutoConfig

    check_folder(path, key)
    check_has_base_model(path, key)
    try:
        return AutoConfig.from_pretrained(path, revision=revision)
    except Exception as error:  # transformers raises many types
        raise UserError(f"{key}: cannot load {path!r}: {first_line(error)}") from None


def without_weights(config: Any) -> nn.Module:
    """Return the model of a config on the meta device; the random state does not change."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = model_class(config).from_config(config).eval()
    return model


def model_class(config: Any) -> Any:
    """Return transformers' auto class that loads a text generator from a config."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING  # Qwen2.5-VL
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _in_4bit(cfg: PolicyConfig, device: torch.device) -> dict[str, Any]:
    """Return options for loading in 4 bits, by default as QLoRA does (arXiv 2305.14314)."""
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=cfg.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=cfg.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=getattr(torch, cfg.bnb_4bit_compute_dtype),
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def _keep_gradients(model: nn.Module) -> None:
    """Turn off a packing of 4-bit weights that gives wrong gradients.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 packs its weights at the first pass in eval mode,
    for a product without a gradient. Adapters below would then be trained wrongly, without error.
    """
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False


def _keep_ids_only(model: Any) -> None:
    """Keep only the ids that end, pad and begin sequences of the model's generation settings.

    The others are not used. Transformers loads many settings that it refuses to save, such as a
    temperature with `do_sample: false`; that would fail at the end of the run.
    """
    from transformers import GenerationConfig

    loaded_config = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=loaded_config.bos_token_id,
        eos_token_id=loaded_config.eos_token_id,
        pad_token_id=loaded_config.pad_token_id,
    )


def first_line(error: Exception) -> str:
    """Return the first line, shortened: transformers lists every model that it knows."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0], 240, placeholder=" ...") if lines else type(error).__name__
