"""A role-play run: check, load and open everything, then train."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from scorekit.errors import ScorekitError, UserError
from scorekit.files import write_atomic
from trainer.rl.barrier import ProcessStalled
from trainer.rl.policy import adapter_config, check_adapters, stop_token_ids
from trainer.roleplay.calibration import FILE, read_calibration
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import columns_of
from trainer.roleplay.evaluation.diagnostics import EchoWatch
from trainer.roleplay.evaluation.evaluate import evaluate_policy, open_tokenizer, prompt_ids
from trainer.roleplay.evaluation.stats import table
from trainer.roleplay.rewards import REWARDS, configure, weights_of
from trainer.roleplay.similarity import embedder_of, open_similarity
from trainer.roleplay.training import check
from trainer.roleplay.training.options import (
    grpo_arguments,
    printed_options,
    updates_per_epoch,
    updates_per_sampling,
)
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.artifacts import Artifacts
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.checkpoints.resume import Origin, check_origin
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import RunLog
from trainer.runs.trl.arguments import remove_printers
from trainer.runs.trl.run import TrlPlan, TrlRun
from trainer.runs.trl.start import TrlStart, start_trl_run

log = logging.getLogger(__name__)


def run_roleplay(cfg: RoleplayConfig, *, resume: bool = False) -> Artifacts:
    """Train, evaluate and log.

    Data, template, embedder and rewards are checked before weights are loaded; an earlier run is
    replaced after that. Raises UserError for whatever the user can fix.
    resume: resume the run of misc.run_dir from its newest complete checkpoint; a run without one
    starts again in its folder.
    """
    with start_trl_run(cfg, "role-play", resume=resume) as start, ExitStack() as exit_stack:
        world = start.world
        inputs = world.on_all(lambda: read_inputs(start))
        plan, reports = plan_of(start, inputs), start.reports
        if start.checkpoint is not None and plan.is_done(start.done, reports):
            total = plan.num_updates
            log.warning("%s has its %d updates. Raise grpo.max_steps", start.folder, total)
            return start.artifacts(reports)
        tokenizer = inputs.tokenizer
        world.on_main(lambda: check.check_chat(cfg, tokenizer, inputs.train))
        world.on_main(lambda: check_adapters(cfg.policy, trl=True))
        folders: list[Path] = []  # one, on the main process
        world.on_main(lambda: folders.append(open_rewards(start, inputs, exit_stack)))
        for folder in folders:
            plan = replace(plan, origin=plan.origin | calibration_origin(folder))
        model = world.on_all(start.load_policy)
        stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
        settings = printed_options(inputs.arguments, stops)
        trainer = world.on_all(lambda: open_trainer(start, inputs, model))
        runlog = start.open_log()
        for folder in folders:
            all_settings = json.dumps(inputs.arguments.to_dict() | settings, indent=1, default=str)
            write_atomic(start.folder / "grpo.json", all_settings)
            if folder != start.folder:
                shutil.copy(folder / FILE, start.folder / FILE)
        return RoleplayRun(start, trainer, runlog, plan, inputs, settings).go()


def read_inputs(start: TrlStart[RoleplayConfig]) -> RunInputs:
    """Return the tokenizer, the turns whose prompt fits, and TRL's arguments. Raises UserError."""
    cfg = start.cfg
    tokenizer = open_tokenizer(cfg)
    train, held_out = check.read_turns(cfg, tokenizer)
    arguments = grpo_arguments(cfg, start.device, weights_of(cfg.reward), len(train))
    return RunInputs(tokenizer, train, held_out, arguments)


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The inputs of a run, read before weights are loaded.

    train, held_out: the turns whose prompt fits.
    arguments: TRL's.
    """

    tokenizer: Any
    train: list[RoleplayTurn]
    held_out: list[RoleplayTurn]
    arguments: Any


def plan_of(start: TrlStart[RoleplayConfig], inputs: RunInputs) -> TrlPlan:
    """Return what a run does. Raises UserError if it would be resumed with other inputs."""
    cfg, arguments = start.cfg, inputs.arguments

    def prompts(turns: Sequence[RoleplayTurn]) -> Iterator[tuple[str, Sequence[int]]]:
        ids = prompt_ids(turns, inputs.tokenizer, cfg) if turns else []
        texts = [json.dumps(asdict(turn), ensure_ascii=False) for turn in turns]
        return zip(texts, ids, strict=True)

    epoch = updates_per_epoch(arguments, len(inputs.train))
    return TrlPlan(
        start.origin({"data.train": prompts(inputs.train), "data.eval": prompts(inputs.held_out)}),
        table(),
        cfg.grpo.max_steps or math.ceil(cfg.grpo.num_train_epochs * epoch),
        span=updates_per_sampling(arguments),
        num_prompts=arguments.generation_batch_size // arguments.num_generations,
        is_evaluated=bool(inputs.held_out),
    )


def open_rewards(start: TrlStart[RoleplayConfig], inputs: RunInputs, exit_stack: ExitStack) -> Path:
    """Open the embedder, and run every reward function on two rows; return the folder of the
    calibration. Only the main process calls it: it scores for all.

    It is the run's own if the run is resumed; else the run's folder may have that of an earlier
    run.
    """
    cfg = start.cfg
    server = exit_stack.enter_context(embedder_of(cfg.reward, start.folder / "embedder.log"))
    folder = start.folder
    if start.checkpoint is None:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
    else:
        check_origin(calibration_origin(folder), read_state(start.checkpoint))
    similarity = open_similarity(
        cfg.reward, inputs.train, folder, server=server, seed=cfg.misc.seed
    )
    exit_stack.enter_context(closing(similarity.embedder))
    configure(cfg.reward, similarity, inputs.tokenizer.all_special_tokens)
    log.info("rewards on two rows: %s", check.try_rewards(inputs.train))
    return folder


def open_trainer(start: TrlStart[RoleplayConfig], inputs: RunInputs, model: nn.Module) -> Any:
    """Return TRL's trainer. Raises UserError."""
    from datasets import Dataset

    from trainer.roleplay.training.grpo import RoleplayTrainer, of_whole_batch

    try:
        trainer = RoleplayTrainer(
            model=model,
            reward_funcs=[of_whole_batch(reward.function, start.world) for reward in REWARDS],
            args=inputs.arguments,
            train_dataset=Dataset.from_dict(columns_of(inputs.train)),
            processing_class=inputs.tokenizer,
            peft_config=adapter_config(model, start.cfg.policy)
            if start.cfg.policy.lora.r
            else None,
            epochs_done=start.done // updates_per_epoch(inputs.arguments, len(inputs.train)),
        )
    except (ImportError, ConnectionError) as error:  # vLLM, or another of TRL's helpers
        raise UserError(f"grpo.options: {' '.join(str(error).split())}") from None
    remove_printers(trainer)
    return trainer


class RoleplayRun(TrlRun[RoleplayConfig]):
    """A role-play run.

    settings: of sampling and training, for the console.
    """

    def __init__(
        self,
        start: TrlStart[RoleplayConfig],
        trainer: Any,
        runlog: RunLog | None,
        plan: TrlPlan,
        inputs: RunInputs,
        settings: dict[str, Any],
    ) -> None:
        from trainer.roleplay.training.grpo import RoleplayCallback

        super().__init__(start, trainer, runlog, plan)
        self.inputs, self.settings = inputs, settings
        self.echo = EchoWatch(start.earlier_lines("eval.jsonl"), start.earlier_lines("log.jsonl"))
        trainer.add_callback(RoleplayCallback(self, self.echo))

    def learn(self) -> ScorekitError | None:
        """Run TRL's loop. If no reward is available, save what was trained."""
        self.console.print_line(", ".join(f"{key} {value}" for key, value in self.settings.items()))
        try:
            return super().learn()
        except ProcessStalled:  # a checkpoint needs all processes
            raise
        except ScorekitError as error:
            update = self.trainer.state.global_step
            if update > self.done and self.trainer.saved != self.trainer.folder_of(update):
                self.trainer._save_checkpoint(self.trainer.model, None)
            return error

    def begin(self) -> None:
        """Check how replies end, and evaluate the start."""
        if self.start.checkpoint is None:
            ratio = check.sampled_ratio(
                self.inputs.train,
                self.trainer.model,
                self.inputs.tokenizer,
                self.cfg,
                self.start.device,
            )
            if ratio is not None:
                self.console.print_line(
                    f"sampled before the first update: clipped_ratio {ratio:.2f}"
                )
        super().begin()

    def evaluate(self, update: int) -> dict[str, Any]:
        """Evaluate the policy on the held-out turns, log and dump."""
        report = evaluate_policy(
            self.inputs.held_out,
            self.trainer.model,
            self.inputs.tokenizer,
            self.cfg,
            self.start.device,
            kl=self.cfg.eval.kl,
            world=self.start.world,
        )
        if self.log:
            line = {"update": update, "set": DEFAULT_EVAL_SET, "decides": True} | report.stats
            self.log.write_evaluation(line, report.examples)
        self.echo.add_evaluation(update, report.stats)
        return report.stats

    def rating(self, stats: Mapping[str, Any]) -> float | None:
        """Return the value by which the best checkpoint is chosen."""
        return stats["reward_mean"]


def calibration_origin(folder: Path) -> Origin:
    """Return the digest of the calibration. Raises UserError if it is missing or invalid."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{path} is missing. Restore the file that the run started with")
    content = read_calibration(path).model_dump_json().encode()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return {"reward.calibration": {"path": FILE, "digest": digest}}
