"""A folder in the form of sentence-transformers: what may be in it, and which model it is.

`modules.json` lists the steps from ids to a vector, each with a folder of its own. Such a list may
name any Python class, which sentence-transformers would import, from a local folder without asking:
here the steps are the few that are known.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from scorekit.digest import digest_files
from scorekit.errors import UserError

#: Of a hub's repository: no ONNX, no OpenVINO.
EMBEDDER_FILES = [
    "*.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "*/pytorch_model.bin",
    "sentencepiece*",
    "*.model",
    "vocab.txt",
    "merges.txt",
]
_STEPS = {"Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"}
#: What a model is made of: the digest is over these.
_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt"}


def check_folder(folder: Path, pooling: str | None) -> None:
    """Raise UserError unless the folder holds a model that can be served.

    pooling: what the user says of it, for a folder that does not say so itself.
    """
    if not folder.is_dir():
        raise UserError(f"--model {folder}: no folder")
    steps = _steps(folder)
    if steps is None:
        if pooling is None:
            raise UserError(
                f"--model {folder}: without modules.json nothing says how its tokens become one "
                "vector, and a wrong guess is another model: say it, --pooling cls or mean"
            )
    elif pooling is not None:
        raise UserError(f"--pooling {pooling}: {folder}/modules.json says it; leave it out")
    root = folder / steps[0][1] if steps else folder
    if not isinstance(_json(root / "config.json"), dict):
        raise UserError(f"{root}/config.json: not a model's configuration")
    if (root / "adapter_config.json").exists():
        raise UserError(f"{root}: an adapter, whose base is elsewhere: merge them first")
    if not any(root.glob("*.safetensors")) and not any(root.glob("pytorch_model*.bin")):
        raise UserError(f"{root}: no weights (*.safetensors or pytorch_model*.bin)")


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """What the model reads before a text, by name, and the name of what it reads by default.
    Raises UserError where config_sentence_transformers.json says what cannot be."""
    path = folder / "config_sentence_transformers.json"
    config = _json(path) if path.exists() else {}
    prompts = config.get("prompts") or {} if isinstance(config, dict) else None
    if not isinstance(prompts, dict):
        raise UserError(f"{path}: prompts is not a mapping of names to texts")
    prompts = {name: "" if text is None else text for name, text in prompts.items()}
    default = config.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()):
        raise UserError(f"{path}: prompts is not a mapping of names to texts")
    if default is not None and default not in prompts:
        raise UserError(f"{path}: default_prompt_name is none of prompts")
    return prompts, default


def digest_folder(folder: Path) -> str:
    """One digest over all files of the model, and over which folder each is in."""
    places = [path for _, path in _steps(folder) or []]
    whole = hashlib.blake2b(digest_size=16)
    for place in sorted({"", *places}):
        files = [p for p in _files(folder / place) if p.suffix in _SUFFIXES]
        whole.update(f"{place}\0{digest_files(files)}\0".encode())
    return whole.hexdigest()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _steps(folder: Path) -> list[tuple[str, str]] | None:
    """(class, folder) of each step; None without modules.json. Raises UserError for a step that is
    not known, or that lies elsewhere."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    try:
        steps = [(step["type"], step["path"]) for step in _json(path)]
    except (TypeError, KeyError):
        steps = []
    if not steps or not all(isinstance(part, str) for step in steps for part in step):
        raise UserError(f"{path}: no list of steps, each with a type and a path")
    for kind, place in steps:
        name = kind.rpartition(".")[2]
        if not kind.startswith("sentence_transformers.") or name not in _STEPS:
            known = ", ".join(sorted(_STEPS))
            raise UserError(f"{path}: a step of type {kind[:80]!r}; there are {known}")
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise UserError(f"{path}: a step's path leads out of the folder")
        if name == "Dense":
            _check_activation(folder / place / "config.json")
    if not steps[0][0].endswith(".Transformer"):
        raise UserError(f"{path}: its first step is no Transformer")
    return steps


def _check_activation(path: Path) -> None:
    """Another activation than torch's would be replaced by tanh, with a warning at most."""
    config = _json(path)
    found = config.get("activation_function") if isinstance(config, dict) else None
    if not isinstance(found, str) or not found.startswith("torch.nn.modules."):
        raise UserError(f"{path}: activation_function is none of torch's (torch.nn.modules...)")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {type(error).__name__}") from None
