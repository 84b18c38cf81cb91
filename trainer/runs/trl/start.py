"""Start a run on a trainer of TRL: its folder, its device, its inputs and its log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from trainer.rl.config import LoraConfig
from trainer.rl.matmul import use_onednn
from trainer.rl.policy.devices import prepare_torch
from trainer.rl.policy.loading import load_policy
from trainer.runs.artifacts import Artifacts, Reports
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.checkpoints.resume import (
    Origin,
    check_origin,
    checkpoint_to_resume,
    prompt_origin,
    weight_origin,
)
from trainer.runs.config import DEFAULT_EVAL_SET, KeptConfig
from trainer.runs.matmul import settle_matmul
from trainer.runs.messages import Messages, messages
from trainer.runs.run_log import RunLog, check_run_dir, open_run_dir, read_jsonl
from trainer.runs.trackers import check_trackers
from trainer.runs.trl.arguments import check_alone, one_device

C = TypeVar("C", bound=KeptConfig)


@dataclass(frozen=True, slots=True)
class TrlStart(Generic[C]):
    """A run whose folder is checked, before its weights are loaded.

    resume: whether a run in its folder is resumed, or started again.
    checkpoint: what it is resumed from; None: it starts from the beginning.
    """

    cfg: C
    device: torch.device
    messages: Messages
    resume: bool
    checkpoint: Path | None

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return Path(self.cfg.misc.run_dir)

    @property
    def done(self) -> int:
        """Return the number of updates of the checkpoint."""
        return read_state(self.checkpoint).update if self.checkpoint else 0

    def earlier_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a file of the run, up to the checkpoint."""
        if self.checkpoint is None:
            return []
        done = self.done
        return [line for line in read_jsonl(self.folder / name) if line["update"] <= done]

    def origin(self, prompts: Mapping[str, Iterable[tuple[str, Sequence[int]]]]) -> Origin:
        """Return the origin of weights and prompts.

        prompts: config key of a file -> its texts, with the prompts as token ids.
        Raises UserError if a run would be resumed with other inputs than it started with.
        """
        origin, sources = weight_origin(self.cfg.policy), self.cfg.sources
        for key, texts_and_ids in prompts.items():
            origin |= prompt_origin(key, sources[key], texts_and_ids)
        if self.checkpoint is not None:
            check_origin(origin, read_state(self.checkpoint))
        return origin

    def load_policy(self) -> nn.Module:
        """Return the policy without adapters, which are added for TRL."""
        changes = {"lora": LoraConfig(), "gradient_checkpointing": False}
        model, _ = load_policy(self.cfg.policy.model_copy(update=changes), self.device)
        if self.cfg.misc.matmul == "onednn":
            use_onednn(model)
        return model

    def open_log(self) -> RunLog:
        """Return the run's log: an earlier run is replaced, or cut after the checkpoint."""
        done = self.done if self.checkpoint else None
        runlog = RunLog(self.cfg, resume=self.resume, done=done)
        self.messages.write_to(runlog.folder)
        return runlog

    @property
    def reports(self) -> Reports:
        """Return (update, stats) of the evaluations up to the checkpoint."""
        return [(line["update"], line) for line in self.earlier_lines("eval.jsonl")]

    def artifacts(
        self,
        reports: Reports,
        saved: Path | None = None,
        stop_reason: str | None = None,
        exit_code: int = 0,
    ) -> Artifacts:
        """Return the artifacts of the run.

        saved: the newest checkpoint of this process; None: there is none.
        """
        return Artifacts(
            self.folder,
            saved or self.checkpoint,
            read_jsonl(self.folder / "log.jsonl"),
            reports,
            {DEFAULT_EVAL_SET: reports} if reports else {},
            stop_reason,
            exit_code=exit_code,
        )


@contextmanager
def start_trl_run(cfg: C, task: str, *, resume: bool) -> Iterator[TrlStart[C]]:
    """Check and create the folder of a run, and record its warnings.

    task: its name, for messages.
    resume: resume the folder's run from its newest complete checkpoint, or start it again.
    Raises UserError for whatever the user can fix.
    """
    check_alone(task)
    misc = cfg.misc
    with messages() as run_messages:
        check_trackers(misc.trackers)
        device = one_device(prepare_torch(misc.device, misc.threads), task)
        checkpoint = checkpoint_to_resume(cfg) if resume else None
        cfg = settle_matmul(cfg, checkpoint, device)
        if checkpoint is None:
            check_run_dir(cfg, resume or None)
        open_run_dir(misc)
        yield TrlStart(cfg, device, run_messages, resume, checkpoint)
