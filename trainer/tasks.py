"""The tasks. The key `task` of a config names one, whose commands work on its own config class."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import BaseModel

from scorekit.config import read_config
from scorekit.errors import UserError

#: Each has a folder with a module `commands`; the first is the default.
TASKS = {
    "translation": "trainer.translation",
    "best_of_n": "trainer.translation.best_of_n",
    "roleplay": "trainer.roleplay",
    "search": "trainer.search",
    "sft": "trainer.sft",
}


class Commands(Protocol):
    """The module `commands` of a task. Each function prints results and returns an exit code."""

    #: The whole config of a run of the task.
    Config: type[BaseModel]

    def train(self, cfg: Any, *, resume: bool) -> int:
        """Train the policy; evaluate it before, between and after."""

    def evaluate(self, cfg: Any, against: str | None, *, overwrite: bool) -> int:
        """Run the policy on the held-out examples, and score the results."""

    def check(self, cfg: Any, processes: int) -> int:
        """Check what a run of so many processes needs, before any weights are loaded."""

    def reward(self, cfg: Any) -> int:
        """Print the reward as YAML, without the passwords of its URLs."""

    def report(self, run_dir: Path) -> int:
        """Write the page of a run, finished or not."""


def commands_of(data: dict[str, Any], source: str | Path) -> Commands:
    """Return the commands of the task that a config names. Raises UserError for an unknown task."""
    task = data.get("task", next(iter(TASKS)))
    if task not in [*TASKS]:  # it may be a list, too
        raise UserError(f"{source}: task: {task!r} is unknown. Choose from {', '.join(TASKS)}")
    return cast(Commands, import_module(f"{TASKS[task]}.commands"))


def commands_of_run(run_dir: Path) -> Commands:
    """Return the commands of the run in a folder; those of the first task without a config.

    Raises UserError if the folder is no run: prepared data has an eval.jsonl, too.
    """
    config = run_dir / "config.yaml"
    if not config.is_file() and not (run_dir / "log.jsonl").is_file():
        raise UserError(f"{run_dir}: not a run (no config.yaml, no log.jsonl)")
    return commands_of(read_config(config) if config.is_file() else {}, config)
