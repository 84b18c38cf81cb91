"""The tasks: `task` of a config names one, which has the general verbs on its own config."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import BaseModel

from scorekit.config import read_config
from scorekit.errors import UserError

#: Each is a folder of this package with a module `commands`; the first is that of a config which
#: names none.
TASKS = ("translation", "roleplay", "search", "sft")


class Commands(Protocol):
    """What a task's module `commands` has. A function tells what it found, and returns the exit
    code of its command."""

    #: The whole config of a run of the task.
    Config: type[BaseModel]

    def train(self, cfg: Any, *, resume: bool) -> int:
        """Train the policy; evaluate it before, between and after."""

    def evaluate(self, cfg: Any, against: str | None, *, overwrite: bool) -> int:
        """Let the policy do the held-out examples, and score what it does."""

    def check(self, cfg: Any) -> int:
        """Look at all that a run needs, before any weights are loaded."""

    def report(self, run_dir: Path) -> int:
        """Write the page of a run, finished or not."""


def commands_of(data: dict[str, Any], where: str | Path) -> Commands:
    """The commands of the task that a config names. Raises UserError where it is none of ours."""
    task = data.get("task", TASKS[0])
    if task not in TASKS:
        raise UserError(f"{where}: task: {task!r} is none of {', '.join(TASKS)}")
    return cast(Commands, import_module(f"trainer.{task}.commands"))


def commands_of_run(run_dir: Path) -> Commands:
    """The same of the run in a folder; of the first task where no config stands there. Raises
    UserError where it is no run's: prepared data has an eval.jsonl, too."""
    config = run_dir / "config.yaml"
    if not config.is_file() and not (run_dir / "log.jsonl").is_file():
        raise UserError(f"{run_dir}: no run here (no config.yaml, no log.jsonl)")
    return commands_of(read_config(config) if config.is_file() else {}, config)
