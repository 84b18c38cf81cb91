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
from trainer.rl.devices import prepare_torch
from trainer.rl.distributed import DistributedContext, FailedOnMain
from trainer.rl.matmul import use_onednn
from trainer.rl.policy import load_policy
from trainer.runs.artifacts import Artifacts, Reports
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.checkpoints.resume import (
    Origin,
    check_origin,
    common_checkpoint,
    prompt_origin,
    weight_origin,
)
from trainer.runs.config import DEFAULT_EVAL_SET, KeptConfig
from trainer.runs.launch import started_processes
from trainer.runs.learner import settle_matmul
from trainer.runs.messages import Messages, messages, messages_of_main
from trainer.runs.run_log import RunLog, check_run_dir, open_run_dir, read_jsonl
from trainer.runs.trackers import check_trackers
from trainer.runs.trl.arguments import one_device
from trainer.runs.trl.processes import (
    changed_processes,
    check_sharding,
    check_trl_launch,
)

C = TypeVar("C", bound=KeptConfig)


@dataclass(frozen=True, slots=True)
class TrlStart(Generic[C]):
    """A run whose folder is checked, before its weights are loaded.

    world: the processes of the run.
    resume: whether a run in its folder is resumed, or started again.
    checkpoint: what it is resumed from; None: it starts from the beginning.
    """

    cfg: C
    world: DistributedContext
    messages: Messages
    resume: bool
    checkpoint: Path | None

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self.world.device

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return Path(self.cfg.misc.run_dir)

    @property
    def done(self) -> int:
        """Return the number of updates of the checkpoint."""
        return read_state(self.checkpoint).update if self.checkpoint else 0

    def earlier_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a file of the run, up to the checkpoint. Every process calls it."""
        if self.checkpoint is None:
            return []
        done = self.done
        return self.world.from_main(
            lambda: [line for line in read_jsonl(self.folder / name) if line["update"] <= done]
        )

    def origin(self, prompts: Mapping[str, Iterable[tuple[str, Sequence[int]]]]) -> Origin:
        """Return the origin of weights and prompts.

        prompts: config key of a file -> its texts, with the prompts as token ids.
        Raises UserError if a run would be resumed with other inputs than it started with.
        """
        origin, sources = weight_origin(self.cfg.policy), self.cfg.sources
        for key, texts_and_ids in prompts.items():
            origin |= prompt_origin(key, sources[key], texts_and_ids)
        if (checkpoint := self.checkpoint) is not None:
            self.world.on_all(lambda: check_origin(origin, read_state(checkpoint)))
        return origin

    def load_policy(self) -> nn.Module:
        """Return the policy without adapters, which are added for TRL."""
        changes = {"lora": LoraConfig(), "gradient_checkpointing": False}
        model, _ = load_policy(self.cfg.policy.model_copy(update=changes), self.device)
        if self.cfg.misc.matmul == "onednn":
            use_onednn(model)
        return model

    def open_log(self) -> RunLog | None:
        """Return the run's log: an earlier run is replaced, or cut after the checkpoint.

        None in a process that is not the main one. Every process has to call it.
        """
        done = self.done if self.checkpoint else None
        runlog = None
        if self.world.is_main:
            runlog = RunLog(self.cfg, resume=self.resume, done=done)
            self.messages.write_to(runlog.folder)
        self.world.wait()  # no process reads the folder while it is created
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
            is_main=self.world.is_main,
            exit_code=exit_code,
        )


@contextmanager
def start_trl_run(cfg: C, task: str, *, resume: bool) -> Iterator[TrlStart[C]]:
    """Check and create the folder of a run, and record its warnings.

    task: its name, for messages.
    resume: resume the folder's run from its newest complete checkpoint, or start it again.
    Raises UserError for whatever the user can fix.
    """
    misc = cfg.misc
    check_trackers(misc.trackers)
    device = one_device(prepare_torch(misc.device, misc.threads), task, started_processes())
    world = DistributedContext(
        device, misc.trackers, Path(misc.run_dir) / "trackers", patience_s=misc.patience_s
    )
    with messages() as run_messages, messages_of_main(world.is_main), world.monitored():
        try:
            world.on_all(lambda: check_trl_launch(cfg, task, world))
            checkpoint = _checkpoint(cfg, world) if resume else None
            cfg = settle_matmul(cfg, checkpoint, world)
            if checkpoint is None:
                world.on_main(lambda: check_run_dir(cfg, resume or None))
            world.on_main(lambda: open_run_dir(misc))
            yield TrlStart(cfg, world, run_messages, resume, checkpoint)
        except FailedOnMain:  # it has printed the error
            raise SystemExit(0) from None


def _checkpoint(cfg: KeptConfig, world: DistributedContext) -> Path | None:
    """Return what the run is resumed from; None: nothing. Raises UserError."""
    checkpoint = common_checkpoint(cfg, world)

    def check() -> None:
        if checkpoint is not None:
            check_sharding(cfg, read_state(checkpoint), world)
            changed_processes(cfg, read_state(checkpoint), world.size)

    world.on_main(check)
    return checkpoint
