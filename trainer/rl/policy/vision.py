"""The image parts of a model that also reads images: they are not trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer.rl.policy.wrappers import unwrap_peft


def freeze_vision(model: nn.Module) -> None:
    """Freeze the image parts of a model that also reads images.

    They get no gradient from texts, and processes that share an update would wait for it.
    """
    bare = unwrap_peft(model)
    if takes_images(bare):
        text_parameter_ids = _text_parameter_ids(bare)
        for parameter in model.parameters():
            if id(parameter) not in text_parameter_ids:
                parameter.requires_grad_(False)


def vision_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that text does not pass, each as large as possible."""
    bare = unwrap_peft(model)
    if not takes_images(bare):
        return []
    text_parameter_ids, image_parts, remaining = _text_parameter_ids(bare), [], [bare]
    while remaining:
        for part in remaining.pop().children():
            reads_text = [id(parameter) in text_parameter_ids for parameter in part.parameters()]
            if any(reads_text):
                remaining.append(part)
            elif reads_text:
                image_parts.append(part)
    return image_parts


def takes_images(bare: Any) -> bool:
    """Return whether a transformers model also reads images."""
    return bare.config.get_text_config() is not bare.config


def _text_parameter_ids(bare: Any) -> set[int]:
    """Return the ids (`id()`) of the parameters that text passes."""
    parts = (bare.get_decoder(), bare.get_output_embeddings())
    return {id(parameter) for part in parts for parameter in part.parameters()}
