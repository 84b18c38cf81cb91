"""Going on with a run that ended before its last update, as if it had not ended.

What the mathematics depends on has to be the same: the config's keys but those that are declared by
`may_change` (among them learning rate, KL and stop rules; a change is said in the log), and what
stands behind the paths and URLs (weights, prompts, what a task asks), which may have moved.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.runs.checkpoints.checkpoint import (
    State,
    checkpoints,
    newest_checkpoint,
    read_state,
    weights_digest,
)
from trainer.runs.config import KeptConfig, check_config

log = logging.getLogger(__name__)

#: Config key -> what stands behind it: `path`, and digests or names that must stay the same.
Origin = dict[str, dict[str, str | None]]


def checkpoint_to_resume(cfg: KeptConfig) -> Path | None:
    """The newest whole checkpoint of misc.run_dir, fit for this config and these weights; None
    where there is no checkpoint yet. Raises UserError where the run cannot go on."""
    folder = Path(cfg.misc.run_dir) / "checkpoints"
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        if checkpoints(folder):
            raise UserError(
                f"{folder}: no checkpoint is whole: the run cannot go on; set misc.overwrite to "
                "true (without --resume) to start anew"
            )
        log.warning("%s has no checkpoint yet: the run starts anew", cfg.misc.run_dir)
        return None
    state = read_state(checkpoint)
    check_config(cfg, state.config)
    check_origin(weight_origin(cfg.policy), state)
    return checkpoint


def weight_origin(cfg: PolicyConfig) -> Origin:
    """The weights that training starts from, and the reference's: never those of a checkpoint."""
    reference, revision = cfg.reference_path, None
    if reference is None:
        reference, revision = cfg.path, cfg.revision
    paths = {
        "policy.path": (cfg.path, cfg.revision),
        "policy.reference_path": (reference, revision),
    }
    return {
        key: {"path": path, "digest": weights_digest(path, of) if path else None}
        for key, (path, of) in paths.items()
    }


def prompt_origin(
    key: str, path: str | None, prompts: Iterable[tuple[str, Sequence[int]]]
) -> Origin:
    """prompts: the texts that are scored, with the prompts as token ids: data, template and
    tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    for text, ids in prompts:
        digest.update(json.dumps([text, list(ids)]).encode())
    return {key: {"path": path, "digest": digest.hexdigest()}}


_MEND = {
    "policy.path": "start a new run to begin from other weights",
    "policy.reference_path": "the KL reference of a run stays the same: name the folder it had",
    "data.train": "the data, the prompt template or the tokenizer have changed",
    "reward.calibration": "put the one back that the run began with",
    "data.eval": "the data, the prompt template or the tokenizer have changed",
}


def check_origin(now: Origin, state: State) -> None:
    """Raise UserError where a run would go on with something else than it began with."""
    for key, here in now.items():
        there = state.origin.get(key)
        mend = _MEND.get(key.partition("_sets.")[0], "scores of one run must be of one model")
        for name in sorted({*here, *(there or {})} - {"path"}):
            if there is not None and there.get(name) != here.get(name):
                raise UserError(
                    f"{key}: {here['path']} is not what the run began with: {name} "
                    f"{here.get(name)} now, {there.get(name)} ({there.get('path')}) then; "
                    f"{mend}"
                )
