"""Models without the wrappers that distribute or adapt them."""

from __future__ import annotations

from typing import Any


def unwrap_distributed(model: Any) -> Any:
    """Return the model without the wrapper that distributes it."""
    return getattr(model, "module", model)


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model without wrappers, peft's included; its adapters still apply."""
    bare = unwrap_distributed(model)
    return bare.get_base_model() if hasattr(bare, "get_base_model") else bare
