"""Low-rank adapters of a policy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.policy.models import first_line, read_config, without_weights
from trainer.rl.policy.vision import vision_parts


def check_adapters(cfg: PolicyConfig, *, trl: bool = False) -> None:
    """Raise UserError if `with_adapters` would, before weights are loaded."""
    if cfg.lora.r:
        config = read_config(str(cfg.path), cfg.revision, "policy.path")
        with_adapters(without_weights(config), cfg, trl=trl)


def adapter_config(model: nn.Module, cfg: PolicyConfig) -> Any:
    """Return peft's config of new adapters; with all-linear, image parts get none."""
    from peft import LoraConfig

    prefixes, targets = _image_prefixes(model), cfg.lora.target_modules
    only_images = rf"({'|'.join(map(re.escape, prefixes))}).*"
    return LoraConfig(
        r=cfg.lora.r,
        lora_alpha=cfg.lora.alpha,  # type: ignore[arg-type]  # peft multiplies with it
        target_modules=targets,
        exclude_modules=only_images if prefixes and targets == "all-linear" else None,
        task_type="CAUSAL_LM",
    )


def with_adapters(model: nn.Module, cfg: PolicyConfig, *, trl: bool = False) -> nn.Module:
    """Return the model in peft's wrapper, with new float32 adapters and everything else frozen.

    New adapters change no output. With all-linear, the image parts of a model get no adapters.
    trl: TRL trains it, which computes log-probabilities without an adapter of the output layer.
    Raises UserError if no layer has such a name; if a layer only processes images: it is frozen,
    and vLLM ignores its adapter silently; if a layer shares its weight with another one; or if
    the output layer has an adapter that TRL would not train.
    """
    from peft import get_peft_model

    image_prefixes = tuple(_image_prefixes(model))
    try:
        with without_tie_warnings():
            adapted: Any = get_peft_model(model, adapter_config(model, cfg)).eval()
    except ValueError as error:
        raise UserError(f"policy.lora.target_modules: {first_line(error)}") from None
    for name in adapted.base_model.targeted_module_names:
        if name.startswith(image_prefixes):
            raise UserError(
                f"policy.lora.target_modules: {name} only processes images, and "
                "stays frozen. Set all-linear, or a pattern of full names that excludes it"
            )
    for name, other in shared_layers(adapted).items():
        raise UserError(
            f"policy.lora.target_modules: {name} has the same weight as {other} (tied), so an "
            f"adapter of it cannot be merged: the merged weight would change {other}, too. Leave "
            "it out (a pattern of full names can), or train a model whose weights are not tied"
        )
    head = adapted.get_base_model().get_output_embeddings()
    if trl and hasattr(head, "base_layer"):
        raise UserError(
            "policy.lora.target_modules: TRL, which trains this task, does not train an adapter of "
            "the output layer. Leave it out, as all-linear does"
        )
    return adapted


@contextmanager
def without_tie_warnings() -> Iterator[None]:
    """Hide peft's warnings of tied weights, a page each, within: `shared_layers` finds them."""
    with warnings.catch_warnings():
        for text in (r"Model (has|with) `tie_word_emb", r"Input and output embeddings are no"):
            warnings.filterwarnings("ignore", text, UserWarning)
        yield


def shared_layers(adapted: nn.Module) -> dict[str, str]:
    """Return each layer with adapters whose weight another layer uses without these adapters.

    Of layers that all have adapters of their own, the last one is left out: it may keep the weight.
    adapted: a model in peft's wrapper. Keys and values are the names of the two layers.
    """
    uses_by_weight: dict[int, dict[int | None, str]] = {}
    for full_name, weight in adapted.named_parameters(remove_duplicate=False):
        owner_name, _, _ = full_name.rpartition(".")
        name, _, inner = owner_name.rpartition(".")
        is_adapted = inner == "base_layer"
        layer = adapted.get_submodule(name) if is_adapted else None  # all plain layers are alike
        uses = uses_by_weight.setdefault(id(weight), {})
        short_name = (name if is_adapted else owner_name).removeprefix("base_model.model.")
        uses.setdefault(id(layer) if is_adapted else None, short_name)
    shared: dict[str, str] = {}
    for uses in uses_by_weight.values():
        adapted_names = [name for layer, name in uses.items() if layer is not None]
        other = uses.get(None, adapted_names[-1] if adapted_names else "")
        shared |= {name: other for name in adapted_names if name != other}
    return shared


def _image_prefixes(model: nn.Module) -> list[str]:
    """Return what the names of layers begin with that only process images."""
    unread = set(vision_parts(model))
    return [f"{name}." for name, part in model.named_modules() if part in unread]
