"""Checkpoints: a Hugging Face folder of the policy, with the files that a run needs to resume.

    step-000020/
        model.safetensors, config.json, tokenizer.json, ...    load with `from_pretrained`
        adapter_model.safetensors, adapter_config.json         instead of the model, with LoRA
        optimizer.pt        AdamW's state
        random.pt           random states, one entry for each process
        state.json          see `State`; with size and digest of every other file

A folder appears under its name only when it is complete: it is written under another name, synced
to disk, and renamed. Only tensors and plain numbers are unpickled.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scorekit.digest import digest_files
from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.files import remove_folder, replacing_folder
from scorekit.net.addresses import without_userinfo
from scorekit.torch_files import check_torch_file, check_weight_files
from trainer.rl.model_files import save_model, save_tokenizer
from trainer.rl.policy import model_class, takes_images, unwrap_peft
from trainer.runs.config import DEFAULT_EVAL_SET

log = logging.getLogger(__name__)

RandomState = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The contents of state.json after `update` updates.

    config, origin: without the passwords of URLs.
    prompts_seen: position in the shuffled passes over the training prompts.
    learning_rate: of the last update.
    reward: mean reward on the held-out examples after this update (None: there was no evaluation,
    or one that scored too few of them).
    rated_by: the evaluation set of this reward.
    origin: paths and digests of the run's inputs, with the reference policy
    (trainer/runs/checkpoints/resume.py).
    is_sharded: whether the optimizer's state has the names of sharded weights.
    versions: of transformers and torch.
    files: name -> [bytes, digest].
    """

    update: int
    config: dict[str, Any]
    prompts_seen: int = 0
    learning_rate: float | None = None
    reward: float | None = None
    rated_by: str = DEFAULT_EVAL_SET
    origin: dict[str, dict[str, str | None]] = field(default_factory=dict)
    processes: int = 1
    is_sharded: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[Any]] = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    model: Any,
    tokenizer: Any,
    optimizer_state: Mapping[str, Any],
    state: CheckpointState,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    random_states: Sequence[RandomState] = (),
) -> Path:
    """Write `folder`, and replace an existing one. Returns it.

    weights: the model's, if they are gathered from several processes.
    Raises OSError, with the folder's name, if the disk is full.
    """
    with replacing_folder(folder) as partial:
        save_model(model, partial, **({} if weights is None else {"state_dict": weights}))
        save_processors(model, tokenizer, partial)
        for name, saved in (("optimizer", dict(optimizer_state)), ("random", list(random_states))):
            with (partial / f"{name}.pt").open("wb") as file:  # torch's own open hides a full disk
                torch.save(saved, file)
        finalize_checkpoint(partial, state)
    return folder


def save_processors(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save the tokenizer of a policy, and its image processor if it reads images.

    The image processor is copied from the folder of the loaded model; some have none, because they
    are trained on texts only.
    """
    save_tokenizer(tokenizer, folder)
    bare = unwrap_peft(model)
    if not takes_images(bare):
        return
    from transformers import AutoImageProcessor

    with suppress(OSError, ValueError):
        AutoImageProcessor.from_pretrained(bare.config.name_or_path).save_pretrained(folder)


def finalize_checkpoint(partial: Path, state: CheckpointState) -> None:
    """Write state.json next to the files of a checkpoint that does not have its final name yet."""
    names = sorted(str(path.relative_to(partial)) for path in _files(partial))
    files = {n: [(partial / n).stat().st_size, digest_files([partial / n])] for n in names}
    # A checkpoint is copied to others; only config.yaml keeps the passwords of URLs.
    inputs = without_userinfo({"config": state.config, "origin": state.origin})
    contents = asdict(state) | inputs | {"versions": versions(), "files": files}
    (partial / "state.json").write_text(json.dumps(contents, indent=1), encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """Return the contents of state.json. Raises UserError if `folder` is no checkpoint."""
    try:
        contents = parse_json((folder / "state.json").read_text(encoding="utf-8"))
        return CheckpointState(
            **without_userinfo(  # an older version stored passwords
                {f.name: contents[f.name] for f in fields(CheckpointState) if f.name in contents}
            )
        )
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"{folder}: not a checkpoint of the trainer (no state.json, or an incomplete one)"
        ) from None


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in a run's folder `checkpoints`, even incomplete, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def damage_reason(folder: Path, *, read: bool = True) -> str | None:
    """Return the reason why a checkpoint is incomplete; None if it is complete.

    read: compare the contents with the digests.
    """
    try:
        files = read_state(folder).files
    except UserError:
        return "no state.json, or an incomplete one"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if read and digest_files([path]) != digest:
            return f"{name} has other contents than were saved"
    return None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; log a warning for each incomplete one."""
    for path in checkpoints(folder):
        reason = damage_reason(path)
        if reason is None:
            return path
        log.warning("%s is skipped: %s", path, reason)
    return None


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the highest held-out reward (the newest of equal ones).

    Only checkpoints that are rated by the newest one's evaluation set count; None without any.
    """
    return max(_rate(folder), key=lambda pair: (pair[0], pair[1].name), default=(0, None))[1]


def _rate(folder: Path) -> Iterator[tuple[float, Path]]:
    rated_by = None
    for path in checkpoints(folder):
        if damage_reason(path, read=False) is None:
            state = read_state(path)
            if state.reward is not None and rated_by in (None, state.rated_by):
                rated_by = state.rated_by
                yield state.reward, path


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints and the best; incomplete ones, too."""
    complete = [path for path in checkpoints(folder) if damage_reason(path, read=False) is None]
    retained = {*complete[:keep], best_checkpoint(folder)}
    for path in checkpoints(folder):
        if path not in retained:
            remove_folder(path)


def load_checkpoint(folder: Path, model: Any) -> CheckpointState:
    """Load the saved weights into `model`.

    Raises UserError if `folder` is no checkpoint, or cannot be read by the installed versions.
    """
    state = read_state(folder)
    check_weight_files(folder)
    try:
        _load_weights(folder, model)
    except Exception as error:  # transformers raises many types
        raise UserError(f"{folder}: {cannot_load(state, error)}") from None
    return state


def load_optimizer_state(folder: Path) -> dict[str, Any]:
    """Return the saved state of the optimizer, on the CPU. Raises UserError."""
    try:
        check_torch_file(folder / "optimizer.pt")
        saved: dict[str, Any] = torch.load(
            folder / "optimizer.pt", map_location="cpu", weights_only=True
        )
    except Exception as error:  # torch raises many types
        raise UserError(f"{folder}: {cannot_load(read_state(folder), error)}") from None
    return saved


def _load_weights(folder: Path, model: Any) -> None:
    if (folder / "adapter_config.json").exists():
        from peft import load_peft_weights, set_peft_model_state_dict

        result: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        if result.unexpected_keys:
            raise ValueError(f"the policy has no adapter {result.unexpected_keys[0]}")
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    saved, loading = model_class(config).from_pretrained(
        folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    if loading["missing_keys"]:
        raise ValueError(f"{sorted(loading['missing_keys'])[0]} is missing")
    model.load_state_dict(saved.state_dict())


def cannot_load(state: CheckpointState, error: Exception) -> str:
    """Return the reason in one line, with the versions if they differ."""
    lines = str(error).strip().splitlines()
    now, then = versions(), state.versions
    differ = [f"{k} {then.get(k)} saved it, this is {now[k]}" for k in now if now[k] != then.get(k)]
    return f"cannot be loaded: {'; '.join([lines[0] if lines else type(error).__name__, *differ])}"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that write and read the weights."""
    import transformers

    return {"transformers": transformers.__version__, "torch": str(torch.__version__)}


def random_state() -> RandomState:
    """Return the random state of this process: torch on CPU and GPU, Python, numpy."""
    state: Any = np.random.get_state()
    kind, keys, position, has_gauss, gauss = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss],
    }


def set_random_state(folder: Path, rank: int) -> None:
    """Restore the random state of process `rank`; nothing happens if it did not exist then.

    Raises UserError if the file is damaged.
    """
    try:
        check_torch_file(folder / "random.pt")
        states = torch.load(folder / "random.pt", map_location="cpu", weights_only=True)
        if rank < len(states):
            put_random_state(states[rank])
    except Exception as error:  # torch raises many types
        raise UserError(f"{folder}: random.pt {cannot_load(read_state(folder), error)}") from None


def put_random_state(state: RandomState) -> None:
    """Restore a result of `random_state`."""
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *gauss_state = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *gauss_state))


def weights_digest(path: str, revision: str | None) -> str:
    """Return a digest of a model's weights and config, from its folder or the hub's local copy."""
    folder = model_folder(path, revision)
    patterns = ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*")
    return digest_files(p for pattern in patterns for p in folder.glob(pattern))


def model_folder(path: str, revision: str | None = None) -> Path:
    """Return the folder of a model's files: its own, or the hub's local copy. Raises UserError."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils.hub import cached_file

    try:
        return Path(str(cached_file(path, "config.json", revision=revision))).parent
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no such model: {str(error).splitlines()[0]}") from None


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
