"""A folder that holds adapters alone, such as a checkpoint of a run with `policy.lora`: the model
that they belong to, and both together, without an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import load_policy
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.checkpoints.resume import check_origin, weight_origin


def holds_adapters(path: str | Path | None) -> bool:
    """Whether a folder holds adapters without the model that they belong to."""
    folder = Path(path or "")
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> tuple[str, str | None]:
    """Path and revision of the model that the adapters belong to: the run's, or what peft noted.

    Raises UserError where a run's base is not there, or not what it was, and where none is named.
    """
    if (folder / "state.json").is_file():
        state = read_state(folder)
        trained = PolicyConfig.model_validate(state.config["policy"])
        check_origin({"policy.path": weight_origin(trained)["policy.path"]}, state)
        return str(trained.path), trained.revision
    noted = _adapter_config(folder)
    path = noted.get("base_model_name_or_path")
    if not path:
        raise UserError(f"{folder}: adapter_config.json names no base_model_name_or_path")
    return str(path), noted.get("revision")


def on_its_base(cfg: PolicyConfig) -> tuple[PolicyConfig, Path | None]:
    """The config of the model that is loaded, and the folder of the adapters that are put on it;
    None: `cfg.path` is a whole model. Raises UserError as `base_of`."""
    if not holds_adapters(cfg.path):
        return cfg, None
    folder = Path(str(cfg.path))
    path, revision = base_of(folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    told = {
        "path": path,
        "revision": revision,
        "tokenizer": cfg.tokenizer or (str(folder) if has_tokenizer else None),
        "lora": LoraConfig(r=_adapter_config(folder).get("r") or 1),
    }
    return cfg.model_copy(update=told), folder


def load_on_base(
    base: PolicyConfig, adapters: Path | None, device: torch.device
) -> tuple[nn.Module, Any]:
    """(model, tokenizer) of what `on_its_base` gave, in eval mode. Raises UserError as
    `load_policy`, and where the adapters do not fit."""
    if adapters is None:
        return load_policy(base, device)
    model, tokenizer = load_policy(base.model_copy(update={"lora": LoraConfig()}), device)
    return put_on(model, adapters), tokenizer


def put_on(model: Any, adapters: Path) -> Any:
    """The model in peft's wrapper with these adapters. Raises UserError where they do not fit."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(adapters)).eval()
    except Exception as error:  # peft raises half a dozen kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{adapters}: cannot be loaded: {lines[0]}") from None


def _adapter_config(folder: Path) -> dict[str, Any]:
    try:
        noted = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return dict(noted)
    except (OSError, ValueError, TypeError):
        raise UserError(f"{folder}: adapter_config.json cannot be read") from None
