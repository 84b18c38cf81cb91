"""Resume a run that ended before its last update, with the same result as without the break.

Whatever changes the results has to be the same: the config's keys except those declared by
`may_change` (among them learning rate, KL and stop rules; a change is logged), and the contents of
paths and URLs (weights, prompts, a task's services). The paths themselves may change.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.distributed import DistributedContext
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    checkpoints,
    newest_checkpoint,
    read_state,
    weights_digest,
)
from trainer.runs.config import KeptConfig, check_config

log = logging.getLogger(__name__)

#: Config key -> its `path`, and digests or names that must stay the same.
Origin = dict[str, dict[str, str | None]]


def checkpoint_to_resume(cfg: KeptConfig) -> Path | None:
    """Return the newest complete checkpoint of misc.run_dir; None without any checkpoint.

    Its config and weights fit those of `cfg`. Raises UserError if the run cannot be resumed.
    """
    folder = Path(cfg.misc.run_dir) / "checkpoints"
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        if checkpoints(folder):
            raise UserError(
                f"{folder}: no checkpoint is complete, so the run cannot be resumed. Set "
                "misc.overwrite to true (without --resume) to start again"
            )
        log.warning(
            "%s has no checkpoint yet. The run starts from the beginning.", cfg.misc.run_dir
        )
        return None
    state = read_state(checkpoint)
    check_config(cfg, state.config)
    check_origin(weight_origin(cfg.policy), state)
    return checkpoint


def common_checkpoint(cfg: KeptConfig, world: DistributedContext) -> Path | None:
    """Return what all processes resume from; None: nothing. Each of them has to call it.

    Raises UserError, on the main process, if one of them cannot resume, or has another checkpoint.
    """
    checkpoint = world.on_all(lambda: checkpoint_to_resume(cfg))
    names = world.gather([None if checkpoint is None else checkpoint.name])

    def check() -> None:
        for rank, name in enumerate(names):
            if name != names[0]:
                raise UserError(
                    f"misc.run_dir: process {rank} has {name or 'no checkpoint'} in "
                    f"{cfg.misc.run_dir}, and process 0 {names[0] or 'none'}. Give all hosts one "
                    "folder, or copy its checkpoints"
                )

    world.on_main(check)
    return checkpoint


def weight_origin(cfg: PolicyConfig) -> Origin:
    """Return the origin of the first weights, not a checkpoint's, and of the reference's."""
    reference, revision = cfg.reference_path, None
    if reference is None:
        reference, revision = cfg.path, cfg.revision
    paths = {
        "policy.path": (cfg.path, cfg.revision),
        "policy.reference_path": (reference, revision),
    }
    return {
        key: {"path": path, "digest": weights_digest(path, weight_revision) if path else None}
        for key, (path, weight_revision) in paths.items()
    }


def prompt_origin(
    key: str, path: str | None, prompts: Iterable[tuple[str, Sequence[int]]]
) -> Origin:
    """Return the origin of prompts, which depends on data, template and tokenizer.

    prompts: the texts that are scored, with the prompts as token ids.
    """
    digest = hashlib.blake2b(digest_size=16)
    for text, ids in prompts:
        digest.update(json.dumps([text, list(ids)]).encode())
    return {key: {"path": path, "digest": digest.hexdigest()}}


_HINTS = {
    "policy.path": "start a new run to begin from other weights",
    "policy.reference_path": "the KL reference of a run stays the same: name the folder it had",
    "data.train": "the data, the prompt template or the tokenizer have changed",
    "reward.calibration": "restore the file that the run started with",
    "data.eval": "the data, the prompt template or the tokenizer have changed",
}


def check_origin(now: Origin, state: CheckpointState) -> None:
    """Raise UserError if a run would be resumed with other inputs than it started with."""
    for key, current in now.items():
        saved = state.origin.get(key)
        hint = _HINTS.get(key.partition("_sets.")[0], "scores of one run must be of one model")
        for name in sorted({*current, *(saved or {})} - {"path"}):
            if saved is not None and saved.get(name) != current.get(name):
                raise UserError(
                    f"{key}: {current['path']} is not what the run started with: {name} "
                    f"{current.get(name)} now, {saved.get(name)} ({saved.get('path')}) then. "
                    f"Hint: {hint}"
                )
