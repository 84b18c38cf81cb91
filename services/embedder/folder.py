"""Check and identify a model folder in the format of sentence-transformers.

`modules.json` lists the modules from ids to a vector, each with its own folder. The file may name
any Python class, and sentence-transformers would import it from a local folder without asking. We
accept only a fixed list of module types.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

from scorekit.digest import digest_files
from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.torch_files import check_weight_files

#: File patterns to download from the hub. ONNX and OpenVINO files are left out.
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
#: Suffixes of the model's files. The digest covers these files.
_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt"}


def check_folder(folder: Path, pooling: str | None) -> None:
    """Raise UserError unless the folder holds a model that can be served.

    pooling: the user's --pooling, required only if the folder has no modules.json.
    """
    if not folder.is_dir():
        raise UserError(f"--model {folder}: this is not a folder")
    steps = _steps(folder)
    if steps is None:
        if pooling is None:
            raise UserError(
                f"--model {folder}: the folder has no modules.json, which names the pooling. "
                "Set it: --pooling cls or --pooling mean"
            )
    elif pooling is not None:
        raise UserError(
            f"--pooling {pooling}: {folder}/modules.json already sets it. Remove the option"
        )
    root = folder / steps[0][1] if steps else folder
    if not isinstance(_json(root / "config.json"), dict):
        raise UserError(f"{root}/config.json: not a model's configuration")
    if (root / "adapter_config.json").exists():
        raise UserError(f"{root}: the folder holds an adapter. Merge it with its base model first")
    if not any(root.glob("*.safetensors")) and not any(root.glob("pytorch_model*.bin")):
        raise UserError(f"{root}: no weights (*.safetensors or pytorch_model*.bin)")
    for subfolder in [path for _, path in steps] if steps else [""]:
        check_weight_files(folder / subfolder)


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt (None: no prompt).

    Raises UserError if config_sentence_transformers.json is invalid."""
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
        raise UserError(f"{path}: default_prompt_name is not a key of prompts")
    return prompts, default


def digest_folder(folder: Path) -> str:
    """Return one digest over the model's files and the names of their folders."""
    subfolders = [path for _, path in _steps(folder) or []]
    digest = hashlib.blake2b(digest_size=16)
    for subfolder in sorted({"", *subfolders}):
        files = [p for p in _files(folder / subfolder) if p.suffix in _SUFFIXES]
        digest.update(f"{subfolder}\0{digest_files(files)}\0".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _steps(folder: Path) -> list[tuple[str, str]] | None:
    """Return (class, folder) of each module; None without modules.json.

    Raises UserError for an unknown module type and for a path outside the folder."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    try:
        steps = [(step["type"], step["path"]) for step in _json(path)]
    except (TypeError, KeyError):
        steps = []
    if not steps or not all(isinstance(part, str) for step in steps for part in step):
        raise UserError(f"{path}: expected a list of modules, each with `type` and `path`")
    for module_class, subfolder in steps:
        name = module_class.rpartition(".")[2]
        if not module_class.startswith("sentence_transformers.") or name not in _STEPS:
            supported = ", ".join(sorted(_STEPS))
            raise UserError(
                f"{path}: unknown module type {module_class[:80]!r}. Supported types: {supported}"
            )
        if PurePosixPath(subfolder).is_absolute() or ".." in PurePosixPath(subfolder).parts:
            raise UserError(f"{path}: a module's path leads out of the folder")
        if name == "Dense":
            _check_activation(folder / subfolder / "config.json")
    if not steps[0][0].endswith(".Transformer"):
        raise UserError(f"{path}: the first module must be a Transformer")
    return steps


def _check_activation(path: Path) -> None:
    """Raise UserError unless the activation is one of torch's.

    sentence-transformers would replace another one by tanh, with at most a warning."""
    config = _json(path)
    activation = config.get("activation_function") if isinstance(config, dict) else None
    if not isinstance(activation, str) or not activation.startswith("torch.nn.modules."):
        raise UserError(f"{path}: activation_function must be a class of torch.nn.modules")


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {type(error).__name__}") from None
