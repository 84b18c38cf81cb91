"""Checkpoints of the Hugging Face hub, fetched ahead of time or when a service starts.

They are in the hub's own cache folder (HF_HOME; in the images /models/hub). A service finds under
the same id what `scorekit fetch` downloaded, with HF_HUB_OFFLINE=1 too. After an
interruption the complete files stay, and the next download fetches the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from scorekit.documents import read_yaml
from scorekit.errors import UserError

METRICX_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*"]
#: The last two are xCOMET-lite's.
XCOMET_FILES = ["hparams.yaml", "checkpoints/*", "config.json", "model.safetensors"]
T5_TOKENIZER_FILES = ["spiece.model", "tokenizer*.json", "special_tokens_map.json", "added_tokens*"]
#: Files of xCOMET's encoder. Its weights are in xCOMET's own checkpoint.
ENCODER_FILES = [
    "config.json",
    "tokenizer*.json",
    "sentencepiece*",
    "spm.model",
    "special_tokens_map.json",
    "added_tokens.json",
]
#: Files of a sequence classifier with its tokenizer and chat template.
REWARD_FILES = [
    "*.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.jinja",
    "*.model",
    "vocab.txt",
    "merges.txt",
]
#: Encoder of xCOMET-lite, if its settings name none.
LITE_ENCODER = "microsoft/mdeberta-v3-base"
#: Tokenizer of MetricX, whose checkpoints come without one.
METRICX_TOKENIZER = "google/mt5-xl"


def hide_short_progress() -> None:
    """Let transformers show a progress bar on a terminal only, and only where it takes seconds.

    It has one for each model that is loaded and for each that is saved. Bars of downloads stay.
    """
    from transformers.utils.logging import set_tqdm_hook

    set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": None, "delay": 5.0}))


def looks_local(model: str) -> bool:
    """Return True if a model name can only be a path. Else it is a hub id unless the folder
    exists."""
    return Path(model).exists() or model.startswith((".", "/", "~")) or model.count("/") != 1


def public_name(name: str) -> str:
    """Return a hub id unchanged, and only the folder's name of a local path.

    Callers must not see paths of the server's disk."""
    return Path(name).absolute().name if looks_local(name) else name


def hub_errors(*other_types: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the types that huggingface_hub raises if the hub or network fails, and other_types.

    It sends requests with httpx2 in version 2, and with httpx in version 1. Its own HTTP error is a
    subclass of that library's, whose other errors (no connection, a lost one) come through as they
    are.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *HfHubHTTPError.__bases__, *other_types)


def fetch_model(
    model: str, revision: str | None, patterns: Sequence[str] | None, flag: str
) -> Path:
    """Return the local folder of a model: the folder itself, or a snapshot from the hub.

    patterns: files of the snapshot to fetch; None: all. Raises UserError if neither exists; `flag`
    names the setting in its message.
    """
    if looks_local(model):
        path = Path(model).expanduser()
        if not path.exists():
            raise UserError(f"{flag} {model}: no such folder")
        if revision is not None:
            raise UserError(f"--revision {revision}: {flag} {model} is a local folder")
        return path
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=None if patterns is None else list(patterns)
        )
    except Exception as error:
        label = f"{flag} {model}".strip()
        raise UserError(
            f"{label}: {_reason(model, revision, error, constants.HF_HUB_CACHE)}"
        ) from None
    return Path(folder)


def _reason(model: str, revision: str | None, error: Exception, cache: str) -> str:
    """Return in one line why the download failed, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{model}"
    response = error.response if isinstance(error, HfHubHTTPError) else None
    status = None if response is None else response.status_code
    if isinstance(error, GatedRepoError) or status == 403:
        return (
            f"its licence has to be accepted first: visit {page} with your account, then set "
            "HF_TOKEN to a token of that account"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it ({page})"
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        token = "HF_TOKEN is wrong, or" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set, or"
        return f"the hub does not show it to you: {token} there is no such model ({page})"
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        obstacle = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} cannot be reached"
        )
        return (
            f"incomplete in {cache}, and {obstacle}: run `scorekit fetch {model}` where "
            "the hub can be reached, with HF_HOME on the same disk or copied here"
        )
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return f"the download failed ({cause}); the same command keeps the complete files"


def fetch_checkpoint(model: str, revision: str | None = None) -> list[tuple[str, Path]]:
    """Download everything that a service needs to start with `--model MODEL`.

    Returns (id, folder) of the model and of its tokenizer or encoder. Other models are fetched
    completely.

    Raises UserError as `fetch_model` does.
    """
    name = model.rsplit("/", 1)[-1].lower()
    if "metricx" in name:
        folder = fetch_model(model, revision, METRICX_FILES + T5_TOKENIZER_FILES, "")
        if any((folder / file).is_file() for file in ("tokenizer.json", "spiece.model")):
            return [(model, folder)]
        tokenizer = fetch_model(METRICX_TOKENIZER, None, T5_TOKENIZER_FILES, "")
        return [(model, folder), (METRICX_TOKENIZER, tokenizer)]
    if "comet" in name:  # XCOMET-XL, wmt22-comet-da, wmt22-cometkiwi-da, ...
        folder = fetch_model(model, revision, XCOMET_FILES, "")
        if (folder / "hparams.yaml").is_file():
            encoder = str(_hparams(folder / "hparams.yaml").get("pretrained_model", ""))
        else:
            config = _hparams(folder / "config.json")
            encoder = str(config.get("pretrained_model", LITE_ENCODER))
        if not encoder or looks_local(encoder):
            return [(model, folder)]
        return [(model, folder), (encoder, fetch_model(encoder, None, ENCODER_FILES, ""))]
    return [(model, fetch_model(model, revision, None, ""))]


def _hparams(path: Path) -> dict[str, object]:
    content = read_yaml(path)
    return content if isinstance(content, dict) else {}


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder; links are followed."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
