"""A short run of a vision model of real size: a cold start from scripted episodes, then updates."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common import ROOT
from bench.vision_model.folder import write_model
from bench.vision_model.phases import Phases
from bench.vision_model.sizes import Sizes
from demo.common import set_flags
from demo.search.run import HERE, ingest, open_services
from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.runs.run_log import read_jsonl

CONFIG = str(ROOT / "configs/search/demo_vision.yaml")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Holds how much is done, and how long it may take.

    sft_steps, sft_s: updates of the cold start, and the seconds after which it is ended.
    updates, train_s: of reinforcement.
    lora_updates: of a further run, with adapters.
    index, cold: index, and rows of scripted episodes, that were made before; None: made now.
    rl, sft: further `--set` values of the two trainings.
    """

    sft_steps: int = 160
    sft_s: float = 240.0
    sft_batch: int = 8
    updates: int = 4
    train_s: float = 300.0
    lora_updates: int = 0
    eval_limit: int = 32
    index: Path | None = None
    cold: Path | None = None
    questions: int | None = None
    device: str = "auto"
    rl: tuple[str, ...] = ()
    sft: tuple[str, ...] = ()


class VisionRun:
    """The phases of a run, each a command as a user would give it."""

    def __init__(self, sizes: Sizes, out: Path, options: RunOptions) -> None:
        self.sizes, self.out, self.options = sizes, out, options
        self.phases = Phases(out)

    def run(self) -> None:
        """Run all phases, and write `summary.json`. Raises UserError if one of them fails."""
        try:
            self._prepare()
            with open_services(self.out) as (flags, searcher):
                settings = [*flags[2:], *self._common()]
                if self.options.cold is None:
                    self._collect(searcher, settings)
                self._cold_start()
                self._reinforce(settings)
        finally:
            self._write_summary()

    def _common(self) -> list[str]:
        return set_flags(
            {"episode.sight.factor": self.sizes.factor, "misc.device": self.options.device}
        )

    def _prepare(self) -> None:
        with self.phases.phase("model") as phase:
            import torch

            drawn_on = "cuda" if torch.cuda.is_available() else "cpu"
            phase.details["weights"] = write_model(self.sizes, self.out / "model", device=drawn_on)
            if drawn_on == "cuda":
                torch.cuda.empty_cache()  # the commands need all of it
        with self.phases.phase("index"):
            if self.options.index is None:
                ingest(self.out / "index", HERE / "corpus")
            else:
                shutil.copytree(self.options.index, self.out / "index")

    def _collect(self, searcher: list[str], settings: list[str]) -> None:
        """Let the scripted searcher play, and export its episodes as rows for this model."""
        teacher = self.out / "teacher"
        keys = {"misc.run_dir": teacher, "rollout.n_agent": 1, "rl.batch_size": 60}
        limit = ["--limit", str(self.options.questions)] if self.options.questions else []
        collect = ("search", "collect", "--config", CONFIG, *searcher, *settings, *limit)
        self._command("collect", collect, keys, limit_s=1800.0)
        rows = ("search", "export", str(teacher), str(self.out / "cold"), "--format", "sft")
        model = ("--model", str(self.out / "model"), "--least-reward", "0.3")
        self._command("rows", (*rows, *model), {}, limit_s=600.0)

    def _cold_start(self) -> None:
        """Fine-tune the model on the scripted episodes."""
        options, batch = self.options, self.options.sft_batch
        settings = {
            "data.train": (options.cold or self.out / "cold") / "rows.jsonl.gz",
            "data.max_length": 6000,
            "policy.path": self.out / "model",
            "policy.gradient_checkpointing": "true",
            "sft.per_device_train_batch_size": math.gcd(batch, 4),
            "sft.gradient_accumulation_steps": batch // math.gcd(batch, 4),
            "sft.max_steps": options.sft_steps,
            "sft.learning_rate": 2e-4,
            "sft.warmup_steps": min(20, max(1, options.sft_steps // 8)),
            "misc.dtype": "bfloat16",
            "misc.seed": 1,
            "misc.device": options.device,
            "misc.save_every_n_updates": 0,
            "misc.run_dir": self.out / "sft",
        }
        self._command("sft", ("sft",), settings, options.sft, limit_s=options.sft_s)
        self._export("sft", "start")

    def _reinforce(self, settings: list[str]) -> None:
        """Train from the cold start, export, and evaluate; then train adapters from there, too."""
        options, start = self.options, self.out / "start"
        flags, extra = ("--config", CONFIG, *settings), options.rl
        keys = {"policy.path": start, "eval.eval_limit": options.eval_limit}
        run = {"misc.run_dir": self.out / "rl", "rl.num_updates": options.updates}
        self._command("train", ("train", *flags), keys | run, extra, limit_s=options.train_s)
        self._export("rl", "trained")
        after = {"policy.path": self.out / "trained", "misc.run_dir": self.out / "after"}
        self._command("evaluate", ("evaluate", *flags), keys | after, extra, limit_s=300.0)
        if options.lora_updates:
            run = {"misc.run_dir": self.out / "lora", "rl.num_updates": options.lora_updates}
            run |= {"policy.lora.r": 16, "policy.weights_dtype": "bfloat16", "data.eval": "null"}
            self._command("lora", ("train", *flags), keys | run, extra, limit_s=options.train_s)

    def _export(self, run: str, name: str) -> None:
        """Export the last checkpoint as a folder; the checkpoint, four times as large, goes."""
        to = ("--to", str(self.out / name), "--dtype", "bfloat16")
        self._command(f"export-{run}", ("export", str(self.out / run), *to), {}, limit_s=180.0)
        shutil.rmtree(self.out / run / "checkpoints")

    def _command(
        self,
        name: str,
        arguments: tuple[str, ...],
        settings: dict[str, Any],
        extra: tuple[str, ...] = (),
        *,
        limit_s: float,
    ) -> None:
        """Run `python -m trainer ARGUMENTS`. Raises UserError if it fails.

        settings, extra: `--set` values; where both have a key, `extra` wins.
        """
        flags = [
            *set_flags(settings),
            *(part for value in extra for part in ("--set", value)),
        ]
        phase = self.phases.run(name, "trainer", *arguments, *flags, limit_s=limit_s)
        if phase.exit_code and "ended_after_s" not in phase.details:
            raise UserError(f"{name} ended with exit code {phase.exit_code}: {self.out}/{name}.log")

    def _write_summary(self) -> None:
        logs = {name: self.out / name / "log.jsonl" for name in ("sft", "rl", "lora")}
        summary = {
            "phases": [asdict(phase) for phase in self.phases.phases],
            **{name: read_jsonl(path) for name, path in logs.items() if path.is_file()},
        }
        for name, path in (
            ("evaluations", self.out / "rl/eval.jsonl"),
            ("after", self.out / "after/evaluation.json"),
        ):
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                summary[name] = read_jsonl(path) if path.suffix == ".jsonl" else json.loads(text)
        write_atomic(self.out / "summary.json", json.dumps(summary, indent=1))
