"""Find a checkpoint of the COMET family, and check it before its weights are read.

Two formats are supported: unbabel-comet's (`hparams.yaml` above `checkpoints/model.ckpt`), and that
of xCOMET-lite on the hub (`config.json` next to `model.safetensors`, as huggingface_hub's mixin
writes them).
"""

from __future__ import annotations

import logging
import pickle
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import numpy as np

from scorekit.documents import FullLoader, parse_json, read_yaml
from scorekit.errors import UserError
from scorekit.torch_files import check_torch_file
from services.xcomet.classes import CLASSES, ENCODERS, LITE

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "sentencepiece.bpe.model", "spm.model")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that passed the checks.

    kind: one of `CLASSES`.
    name: hub id or folder name.
    revision: hub commit, None for local files.
    encoder_model: of `ENCODERS`.
    encoder: local folder or hub id of its config and tokenizer.
    layer_transformation: softmax or sparsemax.
    keys: names of the stored weights.
    """

    kind: str
    name: str
    revision: str | None
    file: Path
    hparams_file: Path
    encoder_model: str
    encoder: str
    layer_transformation: str
    keys: frozenset[str]

    @property
    def encoder_is_local(self) -> bool:
        """Return True if the encoder's files are in a local folder."""
        return Path(self.encoder).is_dir()

    def scoring_files(self) -> list[Path]:
        """Return all local files that a score depends on."""
        files = [self.file, self.hparams_file]
        if self.encoder_is_local:
            names = ("config.json", "tokenizer_config.json", "special_tokens_map.json")
            folder = Path(self.encoder)
            files += [folder / n for n in (*names, *_TOKENIZER_FILES) if (folder / n).is_file()]
        return files


def find_file(path: Path) -> Path:
    """Return the weights file of a local model, given that file or the model's folder."""
    file = path
    if path.is_dir():
        file = path / "checkpoints" / "model.ckpt"
        lite = path / "model.safetensors"
        file = lite if lite.is_file() and not file.is_file() else file
    if not file.is_file():
        raise UserError(
            f"--model {path}: no checkpoints/model.ckpt there. Give a hub id, a folder with "
            "hparams.yaml and checkpoints/model.ckpt, or the .ckpt in it"
        )
    return file.absolute()  # not resolved: the hub's cache links files from another folder


def inspect(
    file: Path, encoder: str | None = None, *, name: str | None = None, revision: str | None = None
) -> Checkpoint:
    """Check a checkpoint and its encoder's files without reading the weights.

    encoder: overrides the stored path. Raises UserError for invalid files.
    """
    folder = file.parent if _is_lite(file) else file.parents[1]
    hparams_file = folder / ("config.json" if _is_lite(file) else "hparams.yaml")
    hparams = _read_hparams(hparams_file)
    stored = read_checkpoint(file)
    weights = stored["state_dict"]
    # A ranking metric compares embeddings and has no head.
    component = "encoder" if hparams["class_identifier"] == "ranking_metric" else "estimator"
    if not any(key.startswith(component + ".") for key in weights):
        raise UserError(f"{file}: no weights of a COMET model (it has no {component})")
    # As upstream: the class comes from hparams.yaml, all other settings from the checkpoint.
    arguments = {**CLASSES[hparams["class_identifier"]], **stored["hyper_parameters"]}
    encoder_model = str(arguments["encoder_model"])
    if encoder_model not in ENCODERS:
        raise UserError(
            f"{file}: encoder_model {encoder_model!r} is not served, only {', '.join(ENCODERS)}"
        )
    encoder_source = resolve_encoder(encoder or str(arguments["pretrained_model"]), folder)
    if Path(encoder_source).is_dir():
        _check_encoder(Path(encoder_source), ENCODERS[encoder_model], weights, file)
    return Checkpoint(
        kind=hparams["class_identifier"],
        name=name or folder.name,
        revision=revision,
        file=file,
        hparams_file=hparams_file,
        encoder_model=encoder_model,
        encoder=encoder_source,
        layer_transformation=decide_layer_transformation(hparams, arguments),
        keys=frozenset(weights),
    )


def resolve_encoder(encoder: str, folder: Path) -> str:
    """Return the encoder's local folder (the checkpoint's folder is tried first), or its hub id."""
    for candidate in (folder / encoder, Path(encoder).expanduser()):
        if candidate.is_dir():
            return str(candidate.absolute())
    if _HUB_ID.fullmatch(encoder):
        return encoder
    raise UserError(
        f"encoder {encoder}: no such folder, nor is it in {folder}; give --encoder a folder with "
        "the encoder's config.json and tokenizer, or its hub id"
    )


def decide_layer_transformation(hparams: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Return softmax or sparsemax for the layer mix, by the rule of unbabel-comet 2.2.4 and later.

    `sparsemax_patch` in hparams.yaml marks models that store sparsemax but were trained with
    softmax. Upstream applies the rule only if pkg_resources is installed, and else silently keeps
    sparsemax; our result must not depend on that.
    """
    stored = arguments["layer_transformation"]
    patched = hparams.get("layer_transformation") == "sparsemax_patch"
    decided = "sparsemax" if stored == "sparsemax" and not patched else "softmax"
    log.info(
        "layer transformation: %s (stored %s, hparams.yaml %s)",
        decided,
        stored,
        hparams.get("layer_transformation"),
    )
    return decided


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Return the checkpoint's content, safely unpickled; weights are memory-mapped, not read."""
    if _is_lite(file):
        return _read_lite(file)
    import torch

    check_torch_file(file)
    try:
        with safe_unpickling():
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        unsafe = _unsafe_globals(file)
        if not unsafe:
            reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
            raise UserError(
                f"{file}: not a checkpoint that torch can load: its data.pkl is damaged, or holds "
                f"more than weights and plain hyper-parameters ({reason[:200]}). Fetch it again"
            ) from None
        raise UserError(
            f"{file}: refused, because reading it could run code ({unsafe}). Save again "
            "only weights and plain hyper-parameters"
        ) from None
    except Exception as error:  # damaged, another archive, ...
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{file}: not a checkpoint that torch can load: {reason}") from None
    for part in ("state_dict", "hyper_parameters"):
        if not isinstance(stored, dict) or not isinstance(stored.get(part), dict):
            raise UserError(f"{file}: not a Lightning checkpoint (it has no {part})")
    weights = stored["state_dict"].items()
    if not all(isinstance(k, str) and isinstance(w, torch.Tensor) for k, w in weights):
        raise UserError(f"{file}: not a Lightning checkpoint (its state_dict holds no weights)")
    return dict(stored)


def _unsafe_globals(file: Path) -> str:
    """Return the names in a pickle that could run code; empty if there are none, or it is
    damaged."""
    import torch

    try:
        with safe_unpickling():
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # it reads the same damaged pickle
        return ""
    return ", ".join(sorted(unsafe))


@contextmanager
def safe_unpickling() -> Iterator[None]:
    """Allow `torch.load(weights_only=True)` to build tensors and the types of hyper-parameters."""
    import torch

    numbers = [type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "bool")]
    harmless = [
        Namespace,
        defaultdict,
        dict,
        list,
        PosixPath,
        *_numpy_scalars(),
        np.dtype,
        *numbers,
    ]
    with torch.serialization.safe_globals(harmless):
        yield


def _numpy_scalars() -> list[Any]:
    """Return numpy's constructor of scalars, under the names of numpy 1 and numpy 2."""
    # A scalar returns the function itself, whose module is private.
    build = np.float64(0).__reduce__()[0]
    name = "multiarray.scalar"
    return [(build, f"numpy.core.{name}"), (build, f"numpy._core.{name}")]


def _is_lite(file: Path) -> bool:
    return file.suffix == ".safetensors"


def _read_lite(file: Path) -> dict[str, Any]:
    """Read a checkpoint of xCOMET-lite, whose arguments are in config.json."""
    from safetensors.torch import load_file

    try:
        weights = load_file(file)
    except Exception as error:  # cut short, another format, ...
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{file}: not weights that safetensors can load: {reason}") from None
    return {
        "state_dict": weights,
        "hyper_parameters": LITE | _read_hparams(file.parent / "config.json"),
    }


def _read_hparams(path: Path) -> dict[str, Any]:
    """Return the settings of hparams.yaml, or of xCOMET-lite's config.json, which names no
    class."""
    if not path.exists():
        raise UserError(f"{path}: missing; it must lie in the folder above the .ckpt's")
    # FullLoader, as upstream: it also reads the tuples that Lightning may write.
    hparams = read_yaml(path, FullLoader)
    if isinstance(hparams, dict) and path.name == "config.json":
        hparams.setdefault("class_identifier", "xcomet_metric")
    class_name = hparams.get("class_identifier") if isinstance(hparams, dict) else None
    if not isinstance(class_name, str) or class_name not in CLASSES:
        raise UserError(
            f"{path}: class_identifier is {class_name!r}; served are {', '.join(CLASSES)}"
        )
    return dict(hparams)


def _check_encoder(folder: Path, model_type: str, weights: dict[str, Any], file: Path) -> None:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(f"encoder {folder}: config.json is missing; give --encoder another folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"encoder {folder}: no tokenizer ({' or '.join(_TOKENIZER_FILES)}); give --encoder "
            "a folder that has one"
        )
    try:
        config = parse_json(config_file.read_bytes())
    except ValueError as error:
        raise UserError(f"{config_file}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{config_file}: not the config of a model")
    if config.get("model_type") != model_type:
        raise UserError(
            f"{config_file}: model_type is {config.get('model_type')!r}, "
            f"the checkpoint needs {model_type!r}"
        )
    if model_type == "deberta-v2" and config.get("type_vocab_size"):
        raise UserError(f"{config_file}: a DeBERTa with token types is not served")
    embeddings = weights.get("encoder.model.embeddings.word_embeddings.weight")
    layers = {k.split(".")[4] for k in weights if k.startswith("encoder.model.encoder.layer.")}
    stored = (*(embeddings.shape if embeddings is not None else (0, 0)), len(layers))
    expected = tuple(config.get(k) for k in ("vocab_size", "hidden_size", "num_hidden_layers"))
    if stored != expected:
        raise UserError(
            f"encoder {folder}: its config says vocabulary, width and layers are {expected}, "
            f"the weights in {file} have {stored}; give --encoder the right folder"
        )
