"""A role-play run: check, load and open everything, then train."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scorekit.errors import ScorekitError, UserError
from scorekit.files import write_atomic
from trainer.rl.config import LoraConfig
from trainer.rl.policy.devices import prepare_torch
from trainer.rl.policy.loading import load_policy
from trainer.rl.policy.tokens import stop_token_ids
from trainer.roleplay.calibration.anchors import FILE, read_calibration
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import columns_of
from trainer.roleplay.evaluation.evaluate import RoleplayReport, evaluate_policy, prompt_ids
from trainer.roleplay.evaluation.stats import table
from trainer.roleplay.rendering import open_tokenizer
from trainer.roleplay.rewards import REWARDS, configure, weights_of
from trainer.roleplay.similarity import open_similarity
from trainer.roleplay.training import preflight
from trainer.roleplay.training.echo import EchoWatch
from trainer.roleplay.training.launcher import embedder_of
from trainer.roleplay.training.options import (
    grpo_arguments,
    printed_options,
    updates_per_epoch,
    updates_per_sampling,
)
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.artifacts import Artifacts
from trainer.runs.checkpoints.checkpoint import CheckpointState, read_state
from trainer.runs.checkpoints.resume import (
    Origin,
    check_origin,
    checkpoint_to_resume,
    prompt_origin,
    weight_origin,
)
from trainer.runs.cli import tables
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.console import Console
from trainer.runs.messages import messages
from trainer.runs.on_trl import check_alone, one_device, trackers_folder
from trainer.runs.run_log import JsonlFile, RunLog, check_run_dir, open_run_dir, read_jsonl
from trainer.runs.shutdown import ShutdownHandler
from trainer.runs.trackers import check_trackers, track, tracking

log = logging.getLogger(__name__)


def run_roleplay(cfg: RoleplayConfig, *, resume: bool = False) -> Artifacts:
    """Train, evaluate and log.

    Data, template, embedder and rewards are checked before weights are loaded; an earlier run is
    replaced after that. Raises UserError for whatever the user can fix.
    resume: resume the run of misc.run_dir from its newest complete checkpoint; a run without one
    starts again in its folder.
    """
    with messages() as run_messages, ExitStack() as exit_stack:
        check_alone("role-play")
        check_trackers(cfg.misc.trackers)
        device = one_device(prepare_torch(cfg.misc.device, cfg.misc.threads), "role-play")
        checkpoint = checkpoint_to_resume(cfg) if resume else None
        if checkpoint is None:
            check_run_dir(cfg, resume or None)
        folder = open_run_dir(cfg.misc)
        tokenizer = open_tokenizer(cfg)
        train, held_out = preflight.read_turns(cfg, tokenizer)
        arguments = grpo_arguments(cfg, device, weights_of(cfg.reward), len(train))
        run = RoleplayRun(cfg, device, tokenizer, train, held_out, arguments, checkpoint)
        if checkpoint is not None and run.is_done(run.done):
            log.warning("%s has its %d updates. Raise grpo.max_steps", folder, run.total)
            return run.artifacts(None, 0)
        preflight.check_chat(cfg, tokenizer, train)
        run.open_rewards(exit_stack, folder)
        run.load()
        runlog = RunLog(cfg, overwrite=resume or None, done=run.done if checkpoint else None)
        run_messages.write_to(runlog.folder)
        settings = run.arguments.to_dict() | run.settings
        write_atomic(folder / "grpo.json", json.dumps(settings, indent=1, default=str))
        if run.calibration is not None:
            shutil.copy(run.calibration, folder / FILE)
        return run.go(runlog)


class RoleplayRun:
    """The parts of a run, opened one after another."""

    def __init__(
        self,
        cfg: RoleplayConfig,
        device: torch.device,
        tokenizer: Any,
        train: Sequence[RoleplayTurn],
        held_out: Sequence[RoleplayTurn],
        arguments: Any,
        checkpoint: Path | None,
    ) -> None:
        self.cfg, self.device, self.tokenizer = cfg, device, tokenizer
        self.train, self.held_out, self.arguments = train, held_out, arguments
        self.checkpoint = checkpoint
        self.done = read_state(checkpoint).update if checkpoint else 0
        self.epoch = updates_per_epoch(arguments, len(train))
        self.total = cfg.grpo.max_steps or math.ceil(cfg.grpo.num_train_epochs * self.epoch)
        folder = Path(cfg.misc.run_dir)
        self.reports = read_reports(folder, self.done) if checkpoint else []
        lines = read_jsonl(folder / "log.jsonl") if checkpoint else []
        self.echo = EchoWatch(
            [report.stats for _, report in self.reports],
            [line for line in lines if line["update"] <= self.done],
        )
        self.origin = weight_origin(cfg.policy)
        for key, path, turns in (
            ("data.train", cfg.data.train, train),
            ("data.eval", cfg.data.eval, held_out),
        ):
            ids = prompt_ids(turns, tokenizer, cfg) if turns else []
            row_texts = [json.dumps(asdict(turn), ensure_ascii=False) for turn in turns]
            self.origin |= prompt_origin(key, path, zip(row_texts, ids, strict=True))
        if checkpoint is not None:
            check_origin(self.origin, read_state(checkpoint))
        self.calibration: Path | None = None
        self.shutdown = ShutdownHandler()

    def is_done(self, update: int) -> bool:
        """Return whether nothing is left to do after an update."""
        evaluated = not self.held_out or self.total in dict(self.reports)
        return update >= self.total and evaluated

    def open_rewards(self, exit_stack: ExitStack, folder: Path) -> None:
        """Open the embedder and its calibration, and run every reward function on two rows."""
        reward = self.cfg.reward
        server = exit_stack.enter_context(embedder_of(reward, folder / "embedder.log"))
        calibration_dir = folder
        if self.checkpoint is None:  # files in the folder are those of an earlier run
            calibration_dir = Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
            self.calibration = calibration_dir / FILE
        else:
            check_origin(calibration_origin(folder), read_state(self.checkpoint))
        similarity = open_similarity(
            reward, self.train, calibration_dir, server=server, seed=self.cfg.misc.seed
        )
        exit_stack.enter_context(closing(similarity.embedder))
        self.origin |= calibration_origin(calibration_dir)
        configure(reward, similarity, self.tokenizer.all_special_tokens)
        means = preflight.try_rewards(self.train)
        log.info("rewards on two rows: %s", means)

    def load(self) -> None:
        """Load the policy, and create TRL's trainer."""
        from datasets import Dataset
        from transformers.trainer_callback import PrinterCallback, ProgressCallback

        from trainer.roleplay.training.grpo import RoleplayTrainer

        cfg = self.cfg
        bare = cfg.policy.model_copy(update={"lora": LoraConfig(), "gradient_checkpointing": False})
        model, _ = load_policy(bare, self.device)
        stops = self.tokenizer.convert_ids_to_tokens(stop_token_ids(model, self.tokenizer))
        self.settings = printed_options(self.arguments, stops)
        try:
            self.trainer = RoleplayTrainer(
                model=model,
                reward_funcs=[reward.function for reward in REWARDS],
                args=self.arguments,
                train_dataset=Dataset.from_dict(columns_of(self.train)),
                processing_class=self.tokenizer,
                peft_config=_adapters(cfg),
                checkpoints=Path(cfg.misc.run_dir) / "checkpoints",
                keep=cfg.misc.keep_checkpoints,
                state_of=self.state,
                evaluate_update=self.evaluate_update,
                epochs_done=self.done // self.epoch,
            )
        except (ImportError, ConnectionError) as error:  # vLLM, or another of TRL's helpers
            raise UserError(f"grpo.options: {' '.join(str(error).split())}") from None
        trainer: Any = self.trainer
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)

    def go(self, runlog: RunLog) -> Artifacts:
        """Run all updates, with evaluations before, between and after."""
        from accelerate import Accelerator

        from trainer.roleplay.training.callback import RunCallback

        cfg, self.log = self.cfg, runlog
        columns, narrow_titles = tables.columns(table())
        self.accelerator = Accelerator(
            log_with=cfg.misc.trackers or None, project_dir=trackers_folder(cfg)
        )
        resumed_update = self.done if self.checkpoint else None
        failure: ScorekitError | None = None
        with (
            self.shutdown,
            tracking(self.accelerator, cfg.model_dump(mode="json"), resumed_update),
            Console(
                columns, narrow_titles, self.total, self.done, verbose=cfg.misc.verbose
            ) as self.console,
        ):
            self.console.print_line(
                ", ".join(f"{key} {value}" for key, value in self.settings.items())
            )
            span = updates_per_sampling(self.arguments)
            callback = RunCallback(
                cfg, runlog, self.shutdown, self.console, span, self.begin, self.echo
            )
            callback.trainer, callback.accelerator = self.trainer, self.accelerator
            callback.last = self.done
            trainer: Any = self.trainer
            trainer.add_callback(callback)
            try:
                self.learn()
            except ScorekitError as error:  # no reward is available: save what was trained
                failure = error
                update = self.trainer.state.global_step
                if update > self.done and self.trainer.saved != self.folder_of(update):
                    self.trainer.save_last_update()
        return self.finish(failure)

    def learn(self) -> None:
        """Run TRL's loop, which calls `begin` when weights and states of the checkpoint are
        loaded."""
        checkpoint = str(self.checkpoint) if self.checkpoint else None
        if self.done < self.total:
            self.trainer.train(resume_from_checkpoint=checkpoint)
            return
        trainer: Any = self.trainer
        trainer._load_from_checkpoint(checkpoint)  # only its evaluation is missing
        self.begin()

    def begin(self) -> None:
        """Check how replies end, and evaluate the start."""
        if not self.checkpoint:
            ratio = preflight.sampled_ratio(
                self.train, self.trainer.policy, self.tokenizer, self.cfg, self.device
            )
            if ratio is not None:
                self.console.print_line(
                    f"sampled before the first update: clipped_ratio {ratio:.2f}"
                )
        eval_interval = self.cfg.eval.eval_every_n_updates
        is_due = self.done in (0, self.total) or (
            eval_interval > 0 and self.done % eval_interval == 0
        )
        if is_due and self.done not in dict(self.reports):
            self.evaluate_update(self.done)

    def evaluate_update(self, update: int) -> dict[str, Any]:
        """Evaluate, log and dump; {} without held-out turns."""
        if not self.held_out:
            return {}
        report = evaluate_policy(
            self.held_out,
            self.trainer.policy,
            self.tokenizer,
            self.cfg,
            self.device,
            kl=self.cfg.eval.kl,
        )
        line = {"update": update, "set": DEFAULT_EVAL_SET, "decides": True} | report.stats
        report.examples = self.log.write_evaluation(line, report.examples)
        track(self.accelerator, "eval", report.stats, update)
        self.console.print_line(tables.evaluation_line(table(), update, report.stats))
        self.echo.add_evaluation(update, report.stats)
        is_new_best = is_best(
            report.rating,
            [
                earlier_report.rating
                for eval_update, earlier_report in self.reports
                if eval_update > 0
            ],
        )
        self.reports.append((update, report))
        save_interval = self.cfg.misc.save_every_n_updates
        if update and ((save_interval and is_new_best) or self.shutdown.signal_number):
            self.trainer.control.should_save = True
        if self.shutdown.signal_number:
            self.trainer.control.should_training_stop = True
        return {f"eval_{key}": value for key, value in report.stats.items()}

    def folder_of(self, update: int) -> Path:
        """Return the folder of a checkpoint."""
        return Path(self.cfg.misc.run_dir) / "checkpoints" / f"step-{update:06d}"

    def state(self, update: int) -> CheckpointState:
        """Return the checkpoint state of the run."""
        self.log.sync()
        prompts = self.arguments.generation_batch_size // self.arguments.num_generations
        seen = update // updates_per_sampling(self.arguments) * prompts
        report = dict(self.reports).get(update)
        scheduler: Any = self.trainer.lr_scheduler
        return CheckpointState(
            update,
            config=self.cfg.model_dump(mode="json"),
            prompts_seen=seen,
            learning_rate=scheduler.get_last_lr()[0],
            reward=report.rating if report else None,
            origin=self.origin,
        )

    def finish(self, failure: ScorekitError | None) -> Artifacts:
        """Return the artifacts of a finished or stopped run."""
        update, signal_number = self.trainer.state.global_step, self.shutdown.signal_number
        saved_state = (
            f"update {update}" if self.trainer.saved or self.checkpoint else "no update yet"
        )
        stop_reason, code = None, 0
        if failure is not None:
            stop_reason, code = f"{failure}; after {saved_state}: resume with --resume", 3
        elif signal_number and not self.is_done(update):
            stop_reason = (
                f"{signal.Signals(signal_number).name} after {saved_state}: resume with --resume"
            )
            code = 128 + signal_number
        if stop_reason:
            log.warning("the run ends: %s", stop_reason)
        return self.artifacts(stop_reason, code)

    def artifacts(self, stop_reason: str | None, code: int) -> Artifacts:
        """Return the artifacts for the command."""
        folder = Path(self.cfg.misc.run_dir)
        checkpoint = getattr(self, "trainer", None) and self.trainer.saved
        updates = read_jsonl(folder / "log.jsonl")
        sets = {DEFAULT_EVAL_SET: self.reports} if self.reports else {}
        return Artifacts(
            folder,
            checkpoint or self.checkpoint,
            updates,
            self.reports,
            sets,
            stop_reason,
            exit_code=code,
        )


def _adapters(cfg: RoleplayConfig) -> Any:
    """Return peft's config; None if every weight is trained."""
    if not cfg.policy.lora.r:
        return None
    from peft import LoraConfig as PeftLora

    lora = cfg.policy.lora
    return PeftLora(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft multiplies with it
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def calibration_origin(folder: Path) -> Origin:
    """Return the digest of the calibration. Raises UserError if it is missing or invalid."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{path} is missing. Restore the file that the run started with")
    content = read_calibration(path).model_dump_json().encode()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return {"reward.calibration": {"path": FILE, "digest": digest}}


def is_best(rating: float | None, earlier: Sequence[float | None]) -> bool:
    """Return whether an evaluation is at least as good as all earlier ones.

    An evaluation without a rating does not count.
    """
    return rating is not None and all(
        earlier_rating is None or rating >= earlier_rating for earlier_rating in earlier
    )


def read_reports(folder: Path, done: int) -> list[tuple[int, RoleplayReport]]:
    """Return the reports of a run's eval.jsonl up to an update."""
    reports = []
    for line in read_jsonl(folder / "eval.jsonl"):
        if line["update"] <= done:
            stats = {k: v for k, v in line.items() if k not in ("update", "set", "decides")}
            report = RoleplayReport(stats, JsonlFile(folder / line["completions"]))
            reports.append((line["update"], report))
    return reports
