"""A round's steps as processes: each is a folder that is done or not, with what it took.

ROUND/steps.json tells of every step that was begun: whether it is done, what it was made with, how
long it has worked and what it has asked for. It is written anew while a step works, so that a loop
which is killed knows what was spent before.
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
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.processes import end_with_parent
from trainer.runs.checkpoints.checkpoint import newest_checkpoint
from trainer.runs.runlog import read_jsonl
from trainer.runs.stops import StopRules
from trainer.search.answer.answers import spent_in
from trainer.search.config import SearchConfig
from trainer.search.rounds.config import RoundLimits
from trainer.search.rounds.plan import changed, settings_of
from trainer.sft.config import SftConfig

FILE = "steps.json"
_PYTHON = [sys.executable]
_BEAT_S = 5.0  # between looks at what a step has taken
_LEAVE_S = 600  # for what a launcher leaves behind that has ended before its training
#: After so many seconds torchrun kills workers that are to leave: 30 where nobody says so.
_TORCHRUN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class StepEnded(UserError):
    """A step ended with an exit code of its own, which the loop's is."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.exit_code = code


@dataclass(slots=True)
class StepRecord:
    """What is known of a step. done: it need not be begun again. note: why it left nothing.
    stopped: the rule by which a training ended early. seconds: of work, all starts together;
    starts: how many. calls, tokens: of paid servers. paid_before: what all files of answers told
    of these without it; paid_after: what they told when it had left; None: it was never seen to."""

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
    """The steps of a round that were begun, by name."""
    try:
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {name: StepRecord(**values) for name, values in told.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / FILE}: cannot be read: {error}") from None


class Steps:
    """The steps of one round. paid: files of answers that its steps write. held: handle of the
    loop's lock, which a step keeps while it works. launch: in place of Python, for trainings."""

    def __init__(
        self,
        folder: Path,
        limits: RoundLimits,
        paid: Sequence[Path],
        held: int,
        launch: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out = folder.parent
        self.folder, self.limits, self.paid = folder, limits, paid
        self.records = read_steps(folder)
        self._held, self._launch = held, launch

    def train(self, cfg: SearchConfig) -> Path:
        """A training; its run's folder. One that its own rule has ended (`stop`) is done."""
        folder = self.folder / "train"
        launch = self._launch or _PYTHON
        command = self._learning(launch, "train", "train")
        env = {_TORCHRUN: os.environ.get(_TORCHRUN, str(_LEAVE_S))}
        self._step("train", cfg, command, env=env, stopped=_ended_by_rule)
        return folder

    def finetune(self, cfg: SftConfig) -> Path:
        """SFT, which is one process on one GPU; its run's folder."""
        self._step("sft", cfg, self._learning(_PYTHON, "sft", "sft"), env=_one_gpu())
        return self.folder / "sft"

    def _learning(self, launch: Sequence[str], name: str, verb: str) -> list[str]:
        begun = ["--resume"] if (self.folder / name).exists() else []
        return [*launch, "-m", "trainer", verb, "--config", self._config(name), *begun]

    def export(self, name: str, run: Path) -> Path:
        """The policy of a run, as a folder that any program loads."""
        to = self.folder / name
        if not self._done(name):
            shutil.rmtree(to, ignore_errors=True)
        self._step(name, None, [*_PYTHON, "-m", "trainer", "export", str(run), "--to", str(to)])
        return to

    def curate(self, name: str, cfg: BaseModel, *flags: object) -> Path:
        """A command of `trainer search`; its folder."""
        out = self.folder / name
        told = ["--config", self._config(name), "--out", str(out), "--overwrite"]
        command = [*_PYTHON, "-m", "trainer", "search", name, *told, *map(str, flags)]
        self._step(name, cfg, command, flags)
        return out

    def skip(self, name: str, why: str) -> None:
        """A step that has nothing to do."""
        if not self._done(name):
            self._say(f"{name}: left out: {why}")
        self._write(name, StepRecord(done=True, note=why))

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
        """Do it, unless it is done. flags: what a command of curation reads. env: besides ours.
        stopped: why an exit code of 1 is an end, too; None: it is none. Raises UserError where what
        is done was made otherwise, where the round's budget is used up, and where it does not end
        well."""
        settings = {} if cfg is None else settings_of(name, cfg, self.out, flags)
        if self._done(name):
            self._check_same(name, settings)
            self._say(f"{name}: done")
            return
        if cfg is not None:
            save_config(cfg, self._config(name))
        record = self._begun(name)
        record.settings = settings
        self._check_limits(name)
        self._write(name, record)
        self._say(f"{name}: {'goes on' if record.starts > 1 else 'begins'}")
        code = self._run(name, record, command, env or {})
        why = stopped(cfg, self.folder / name) if code == 1 else None
        if code and why is None:
            raise StepEnded(
                f"{self.folder.name}: {name} ended with exit code {code}: see what it said; the "
                "loop goes on from there when it is started again",
                code if code > 0 else 128 - code,
            )
        record.done, record.stopped = True, why or ""
        self._write(name, record)

    def _begun(self, name: str) -> StepRecord:
        """Its record at another start. What others paid for since it has left is not its own."""
        now = self._paid()
        record = self.records.get(name, StepRecord(paid_before=now))
        if record.paid_after is not None:
            both = zip(record.paid_before, now, record.paid_after, strict=True)
            record.paid_before = [before + later - left for before, later, left in both]
        record.paid_after = None
        record.starts += 1
        return record

    def _run(
        self, name: str, record: StepRecord, command: Sequence[str], env: Mapping[str, str]
    ) -> int:
        """Its exit code; the record grows while it works, and while it leaves."""
        begun, before = time.monotonic(), record.seconds

        def note() -> None:
            record.seconds = before + time.monotonic() - begun
            paid = self._paid()
            record.calls, record.tokens = (
                now - before for now, before in zip(paid, record.paid_before, strict=True)
            )
            record.paid_after = None if child.returncode is None else paid
            self._write(name, record)

        child = subprocess.Popen(
            command,
            env=os.environ | env,
            start_new_session=True,  # so that Ctrl-C reaches the loop alone, which ends it in order
            preexec_fn=end_with_parent(),
            pass_fds=[self._held],
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_BEAT_S)
                note()
                if child.returncode is not None:
                    return child.returncode
                self._check_limits(name)
        except BaseException:
            _end(child)
            note()
            raise

    def _paid(self) -> tuple[int, int]:
        """(calls, tokens) so far."""
        charges = [spent_in(path) for path in self.paid]
        tokens = sum(of.prompt_tokens + of.completion_tokens for of in charges)
        return sum(of.calls for of in charges), tokens

    def _check_limits(self, name: str) -> None:
        of = self.records.values()
        hours = sum(one.seconds for one in of) / 3600
        used = {"calls": sum(one.calls for one in of), "tokens": sum(one.tokens for one in of)}
        for key, value in {**used, "hours": hours}.items():
            limit = getattr(self.limits, key)
            if limit is not None and value >= limit:
                raise UserError(
                    f"{self.folder.name}: {name}: the round has used up its limits.{key} of "
                    f"{limit:g}: raise it, and start the loop again"
                )

    def _check_same(self, name: str, settings: Mapping[str, Any]) -> None:
        if not self.records[name].note and not (self.folder / name).is_dir():
            raise UserError(
                f"{self.folder / name}: was done, and is not there any more: put it back, or let "
                "the loop fill another folder"
            )
        differ = changed(self.records[name].settings, settings)
        if differ:
            raise UserError(
                f"{self.folder / name}: was made with other settings ({'; '.join(differ)}): set "
                "them back, or let the loop fill another folder"
            )

    def _write(self, name: str, record: StepRecord) -> None:
        self.records[name] = record
        told = {step: asdict(of) for step, of in self.records.items()}
        write_atomic(self.folder / FILE, json.dumps(told, indent=1, ensure_ascii=False))

    def _say(self, what: str) -> None:
        typer.echo(f"[{self.folder.name}] {what}")


def _ended_by_rule(cfg: SearchConfig, folder: Path) -> str | None:
    """The rule by which a training ended that has left a policy; None: it ended otherwise."""
    if newest_checkpoint(folder / "checkpoints") is None:
        return None
    return StopRules(cfg.stop, read_jsonl(folder / "log.jsonl")).reason


def _one_gpu() -> dict[str, str]:
    """Of those that are shown to us the first."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": shown.split(",")[0]}


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to it and to what it has started, on which a training leaves a checkpoint; at another
    signal to us, or where that takes too long, SIGKILL."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        patience = time.monotonic() + _LEAVE_S
        while _at_work(child.pid) and time.monotonic() < patience:
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _at_work(group: int) -> bool:
    """Whether a process of that group is left (Linux; elsewhere nobody knows)."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


@contextmanager
def held(out: Path) -> Iterator[int]:
    """The loop's folder is ours, and of the steps that are given the handle. Raises UserError where
    another has it."""
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(
            f"{out}: another loop is at work there, or a step of one that was killed has not ended "
            "yet: wait for it, or end it"
        ) from None
    try:
        yield lock
    finally:
        os.close(lock)
