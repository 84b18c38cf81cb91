"""Load a folder that has adapters only, such as a checkpoint of a run with `policy.lora`.

Their base model is found and both are loaded together, without an export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.torch_files import check_weight_files
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import holds_adapters, load_policy, without_tie_warnings
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.checkpoints.resume import check_origin, weight_origin


def base_of(folder: Path) -> tuple[str, str | None]:
    """Return path and revision of the adapters' base model: the run's, or the one in peft's config.

    Raises UserError if a run's base is missing or has changed, or if no base is named.
    """
    if (folder / "state.json").is_file():
        state = read_state(folder)
        policy_config = PolicyConfig.model_validate(state.config["policy"])
        check_origin({"policy.path": weight_origin(policy_config)["policy.path"]}, state)
        return str(policy_config.path), policy_config.revision
    adapter_config = _adapter_config(folder)
    path = adapter_config.get("base_model_name_or_path")
    if not path:
        raise UserError(f"{folder}: adapter_config.json names no base_model_name_or_path")
    return str(path), adapter_config.get("revision")


def resolve_base_model(cfg: PolicyConfig) -> tuple[PolicyConfig, Path | None]:
    """Return the config of the base model, and the folder of its adapters.

    The folder is None if `cfg.path` is a full model. Raises UserError as `base_of`.
    """
    if not holds_adapters(cfg.path or ""):
        return cfg, None
    folder = Path(str(cfg.path))
    path, revision = base_of(folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    changes = {
        "path": path,
        "revision": revision,
        "tokenizer": cfg.tokenizer or (str(folder) if has_tokenizer else None),
        "lora": LoraConfig(r=_adapter_config(folder).get("r") or 1),
    }
    return cfg.model_copy(update=changes), folder


def load_on_base(
    base: PolicyConfig, adapters: Path | None, device: torch.device
) -> tuple[nn.Module, Any]:
    """Return (model, tokenizer) of a result of `resolve_base_model`, in eval mode.

    Raises UserError as `load_policy`, and if the adapters do not fit.
    """
    if adapters is None:
        return load_policy(base, device)
    model, tokenizer = load_policy(base.model_copy(update={"lora": LoraConfig()}), device)
    return attach_adapters(model, adapters), tokenizer


def attach_adapters(model: Any, adapters: Path) -> Any:
    """Return the model in peft's wrapper with adapters. Raises UserError if they do not fit."""
    from peft import PeftModel

    check_weight_files(adapters)
    try:
        with without_tie_warnings():
            return PeftModel.from_pretrained(model, str(adapters)).eval()
    except Exception as error:  # peft raises many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{adapters}: cannot be loaded: {lines[0]}") from None


def _adapter_config(folder: Path) -> dict[str, Any]:
    try:
        values = parse_json((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return dict(values)
    except (OSError, ValueError, TypeError):
        raise UserError(f"{folder}: adapter_config.json cannot be read") from None
