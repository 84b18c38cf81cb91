"""Run the steps of a round as processes, each with a folder, and record their cost.

ROUND/steps.json has an entry for each started step: whether it is done, its settings, its seconds
and its paid usage. It is updated while a step runs, so a killed loop knows what was spent.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from scorekit.config import save_config
from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.net.addresses import without_userinfo
from scorekit.paid.store import spent_in
from scorekit.processes import end_with_parent, same_modules
from trainer.runs.checkpoints.checkpoint import newest_checkpoint
from trainer.runs.run_log import read_jsonl
from trainer.runs.stops import StopRules
from trainer.search.answer.config import SEARCH
from trainer.search.config import SearchConfig
from trainer.search.rounds.config import RoundLimits
from trainer.search.rounds.plan import changed, settings_of, with_new_keys
from trainer.sft.config import SftConfig

FILE = "steps.json"
_PYTHON = [sys.executable]
_BEAT_S = 5.0  # between two updates of a step's record
_LEAVE_S = 600  # for processes that outlive their launcher
#: Seconds until torchrun kills workers after SIGTERM; its default is 30.
_TORCHRUN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class StepFailed(UserError):
    """A step failed; the loop exits with its exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(slots=True)
class StepRecord:
    """The record of a step in steps.json.

    done: it is complete.
    note: why it has no output.
    stopped: the rule that ended a training early.
    seconds: of all starts.
    starts: their number.
    calls, tokens: of paid servers.
    paid_before: the usage in all files of answers without this step.
    paid_after: the same after it ended; None: its end is unknown.
    """

    done: bool = False
    note: str = ""
    stopped: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    starts: int = 0
    calls: int = 0
    tokens: int = 0
    paid_before: Sequence[int] = (0, 0)
    paid_after: Sequence[int] | None = None


def read_steps(folder: Path) -> dict[str, StepRecord]:
    """Return the started steps of a round by name."""
    try:
        records = parse_json((folder / FILE).read_text(encoding="utf-8"))
        return {name: StepRecord(**values) for name, values in records.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / FILE}: cannot be read: {error}") from None


class Steps:
    """The steps of one round.

    paid: files of answers that its steps write.
    lock: file descriptor of the loop's lock, which a running step inherits.
    launch: launcher of trainings."""

    def __init__(
        self,
        folder: Path,
        limits: RoundLimits,
        paid: Sequence[str],
        lock: int,
        launch: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out = folder.parent
        self.folder, self.limits, self.paid = folder, limits, paid
        self.records = read_steps(folder)
        self._lock, self._launch = lock, launch

    def train(self, cfg: SearchConfig) -> Path:
        """Run the training and return its run directory. A training ended by `stop` is done."""
        folder = self.folder / "train"
        launch = self._launch or _PYTHON
        command = self._training_command(launch, "train", "train")
        env = {_TORCHRUN: os.environ.get(_TORCHRUN, str(_LEAVE_S))}
        self._step("train", cfg, command, env=env, stopped=_ended_by_rule)
        return folder

    def finetune(self, cfg: SftConfig) -> Path:
        """Run SFT in one process on one GPU and return its run directory."""
        self._step("sft", cfg, self._training_command(_PYTHON, "sft", "sft"), env=_one_gpu())
        return self.folder / "sft"

    def _training_command(self, launch: Sequence[str], name: str, command: str) -> list[str]:
        resume_flags = ["--resume"] if (self.folder / name).exists() else []
        return [*launch, "-m", "trainer", command, "--config", self._config(name), *resume_flags]

    def export(self, name: str, run: Path) -> Path:
        """Export the policy of a run and return its folder."""
        to = self.folder / name
        if not self._done(name):
            shutil.rmtree(to, ignore_errors=True)
        self._step(name, None, [*_PYTHON, "-m", "trainer", "export", str(run), "--to", str(to)])
        return to

    def curate(self, name: str, cfg: BaseModel, *flags: object) -> Path:
        """Run a command of `trainer search` and return its folder."""
        out = self.folder / name
        options = ["--config", self._config(name), "--out", str(out), "--overwrite"]
        command = [*_PYTHON, "-m", "trainer", "search", name, *options, *map(str, flags)]
        self._step(name, cfg, command, flags)
        return out

    def skip(self, name: str, reason: str) -> None:
        """Record a step that has nothing to do."""
        if not self._done(name):
            self._print(f"{name}: skipped: {reason}")
        self._write(name, StepRecord(done=True, note=reason))

    def _config(self, name: str) -> str:
        return str(self.folder / f"{name}.yaml")

    def _done(self, name: str) -> bool:
        return name in self.records and self.records[name].done

    def _step(
        self,
        name: str,
        cfg: BaseModel | None,
        command: Sequence[str],
        flags: Sequence[object] = (),
        *,
        env: Mapping[str, str] | None = None,
        stopped: Callable[[Any, Path], str | None] = lambda cfg, folder: None,
    ) -> None:
        """Run a step unless it is done.

        flags: input options of a curation command.
        env: additional variables.
        stopped: returns why an exit code of 1 is a regular end, or None.
        Raises UserError if a done step had other settings, if the round's budget is used up, and if
        the step fails.
        """
        settings = {} if cfg is None else settings_of(name, cfg, self.out, flags)
        if self._done(name):
            self._check_same(name, settings, cfg)
            self._print(f"{name}: done")
            return
        if cfg is not None:
            save_config(cfg, self._config(name))
        record = self._start_record(name)
        record.settings = settings
        self._check_limits(name)
        self._write(name, record)
        self._print(f"{name}: {'continues' if record.starts > 1 else 'starts'}")
        code = self._run(name, record, command, env or {})
        end_reason = stopped(cfg, self.folder / name) if code == 1 else None
        if code and end_reason is None:
            raise StepFailed(
                f"{self.folder.name}: {name} ended with exit code {code}. See its output. Start "
                "the loop again to continue.",
                code if code > 0 else 128 - code,
            )
        record.done, record.stopped = True, end_reason or ""
        self._write(name, record)

    def _start_record(self, name: str) -> StepRecord:
        """Return the record at a new start, without the usage of other steps since its end."""
        current = self._paid()
        record = self.records.get(name, StepRecord(paid_before=current))
        if record.paid_after is not None:
            counts = zip(record.paid_before, current, record.paid_after, strict=True)
            record.paid_before = [before + later - at_end for before, later, at_end in counts]
        record.paid_after = None
        record.starts += 1
        return record

    def _run(
        self, name: str, record: StepRecord, command: Sequence[str], env: Mapping[str, str]
    ) -> int:
        """Run the process of a step, update its record, and return the exit code."""
        started_at, earlier_seconds = time.monotonic(), record.seconds

        def update_record() -> None:
            record.seconds = earlier_seconds + time.monotonic() - started_at
            paid = self._paid()
            record.calls, record.tokens = (
                current - earlier_seconds
                for current, earlier_seconds in zip(paid, record.paid_before, strict=True)
            )
            record.paid_after = None if child.returncode is None else paid
            self._write(name, record)

        child = subprocess.Popen(
            command,
            env={**os.environ, **same_modules(), **env},
            start_new_session=True,  # Ctrl-C reaches only the loop, which ends the step
            preexec_fn=end_with_parent(),
            pass_fds=[self._lock],
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_BEAT_S)
                update_record()
                if child.returncode is not None:
                    return child.returncode
                self._check_limits(name)
        except BaseException:
            _end(child)
            update_record()
            raise

    def _paid(self) -> tuple[int, int]:
        """Return (calls, tokens) of all files of answers."""
        charges = [spent_in(location, SEARCH) for location in self.paid]
        tokens = sum(charge.prompt_tokens + charge.completion_tokens for charge in charges)
        return sum(charge.calls for charge in charges), tokens

    def _check_limits(self, name: str) -> None:
        records = self.records.values()
        used = {
            "calls": sum(record.calls for record in records),
            "tokens": sum(record.tokens for record in records),
            "hours": sum(record.seconds for record in records) / 3600,
        }
        for key, value in used.items():
            limit = getattr(self.limits, key)
            if limit is not None and value >= limit:
                raise UserError(
                    f"{self.folder.name}: {name}: the round has used up its limits.{key} of "
                    f"{limit:g}. Raise it and start the loop again."
                )

    def _check_same(self, name: str, settings: Mapping[str, Any], cfg: BaseModel | None) -> None:
        if not self.records[name].note and not (self.folder / name).is_dir():
            raise UserError(
                f"{self.folder / name}: the step was done, but its folder is missing. Restore it, "
                "or use another folder for the loop."
            )
        recorded: Mapping[str, Any] = self.records[name].settings
        if cfg is not None:
            recorded = with_new_keys(recorded, settings, name, cfg)
        differ = changed(without_userinfo(recorded), without_userinfo(settings))
        if differ:
            raise UserError(
                f"{self.folder / name}: made with other settings ({'; '.join(differ)}). Restore "
                "them, or use another folder for the loop."
            )

    def _write(self, name: str, record: StepRecord) -> None:
        self.records[name] = record
        records = {step: asdict(step_record) for step, step_record in self.records.items()}
        text = json.dumps(without_userinfo(records), indent=1, ensure_ascii=False)
        write_atomic(self.folder / FILE, text)

    def _print(self, message: str) -> None:
        typer.echo(f"[{self.folder.name}] {message}")


def _ended_by_rule(cfg: SearchConfig, folder: Path) -> str | None:
    """Return the rule that ended a training with a checkpoint; None: another end."""
    if newest_checkpoint(folder / "checkpoints") is None:
        return None
    return StopRules(cfg.stop, read_jsonl(folder / "log.jsonl")).reason


def _one_gpu() -> dict[str, str]:
    """Return the environment with only the first visible GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a process group, so a training writes a checkpoint, and then SIGKILL.

    SIGKILL follows after `_LEAVE_S` or at another signal to this process.
    """
    try:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        deadline = time.monotonic() + _LEAVE_S
        while _is_group_alive(child.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _is_group_alive(group: int) -> bool:
    """Return whether a process of a group is alive (only on Linux; elsewhere False)."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                return True
    return False


@contextmanager
def lock_loop(out: Path) -> Iterator[int]:
    """Lock the loop's folder and yield the file descriptor, which steps inherit.

    Raises UserError if another loop has the lock.
    """
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(
            f"{out}: another loop uses it, or a step of a killed loop still runs. Wait for it, "
            "or end it."
        ) from None
    try:
        yield lock
    finally:
        os.close(lock)
