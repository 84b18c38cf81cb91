"""Low-rank adapters of a policy."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.policy.models import first_line, read_config, without_weights
from trainer.rl.policy.vision import vision_parts


def check_adapters(cfg: PolicyConfig) -> None:
    """Raise UserError if `with_adapters` would, before weights are loaded."""
    if cfg.lora.r:
        config = read_config(str(cfg.path), cfg.revision, "policy.path")
        with_adapters(without_weights(config), cfg)


def with_adapters(model: nn.Module, cfg: PolicyConfig) -> nn.Module:
    """Return the model in peft's wrapper, with new float32 adapters and everything else frozen.

    New adapters change no output. With all-linear, the image parts of a model get no adapters.
    Raises UserError if no layer has such a name, or if a layer only processes images: it is frozen,
    and vLLM ignores its adapter silently.
    """
    from peft import LoraConfig, get_peft_model

    unread = set(vision_parts(model))
    image_prefixes = [f"{name}." for name, part in model.named_modules() if part in unread]
    only_images = rf"({'|'.join(map(re.escape, image_prefixes))}).*"
    targets = cfg.lora.target_modules
    lora_config = LoraConfig(
        r=cfg.lora.r,
        lora_alpha=cfg.lora.alpha,  # type: ignore[arg-type]  # peft multiplies with it
        target_modules=targets,
        exclude_modules=only_images if image_prefixes and targets == "all-linear" else None,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: Any = get_peft_model(model, lora_config).eval()
    except ValueError as error:
        raise UserError(f"policy.lora.target_modules: {first_line(error)}") from None
    for name in adapted.base_model.targeted_module_names:
        if name.startswith(tuple(image_prefixes)):
            raise UserError(
                f"policy.lora.target_modules: {name} only processes images, and "
                "stays frozen. Set all-linear, or a pattern of full names that excludes it"
            )
    return adapted
