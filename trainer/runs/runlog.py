"""The folder of a run, and the format of what stands in it.

runs/<name>/
    config.yaml             the resolved config
    log.jsonl               one object for each update
    eval.jsonl              one object for each evaluation
    completions/            train-000001.jsonl, eval-000000.jsonl (of a set with a name,
                            eval-NAME-000000.jsonl): one object for each completion
    trajectories/           of a search run: trainer/search/trajectories/store.py
    messages.log            the warnings of every start, with their time: what was left out, or
                            waited for, which settings have changed, why it ended
    checkpoints/            step-000020/: see trainer/runs/checkpoints/checkpoint.py
    services.json           URL -> what `/v1/info` of the service there said at the start
    trackers/               files of TensorBoard and other trackers (misc.trackers)
    report.html             all this, for eyes
    evaluation.json, .jsonl, .html
                            the report and the dump of `python -m trainer evaluate`; of a set with
                            a name, evaluation-NAME.json and so on
    comparison.json, .html  the same against another policy, whose evaluation stands in against/

What the lines hold is the task's: trainer/translation/dumps.py.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from scorekit.config import load_config, save_config
from scorekit.errors import UserError
from scorekit.files import naming, remove_folder, remove_temporaries, sync, write_atomic
from scorekit.schemas import Info
from trainer.runs.config import THE_SET, KeptConfig, PlaceConfig

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_OWN = (
    "config.yaml",
    "log.jsonl",
    "eval.jsonl",
    "services.json",
    "completions",
    "trajectories",
    "checkpoints",
    "trackers",
    "messages.log",
)
#: What the kinds of run write into the folder beside. Other commands write there, too, at any time
#: (evaluate, report): of these names no temporary is taken away.
_BESIDE = ("data.json", "figures.json", "grpo.json", "index.json")


class RunLog:
    """Writes the folder of a run. Raises UserError as `check_run_dir` does; only what this class
    writes is replaced."""

    def __init__(
        self,
        cfg: KeptConfig,
        services: Mapping[str, Info] | None = None,
        *,
        overwrite: bool | None = None,
        done: int | None = None,
    ) -> None:
        """overwrite: default: the config's. done: go on after this update; None: start anew."""
        self.folder = Path(cfg.misc.run_dir)
        if done is None:
            check_run_dir(cfg, overwrite)
            self._start(cfg)
        else:
            self._cut(done)
            _write_config(cfg, self.folder)
        self._remove_temporaries()
        if services is not None:
            infos = {url: info.model_dump(mode="json") for url, info in services.items()}
            write_atomic(self.folder / "services.json", json.dumps(infos, indent=1))

    def _start(self, cfg: KeptConfig) -> None:
        """Remove an earlier run: its checkpoints first and at once, its config last, so that what a
        process that dies leaves is always a run, and never this one with checkpoints of that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove(self.folder / "checkpoints")
        _write_config(cfg, self.folder)
        for name in set(_OWN) - {"checkpoints", "config.yaml"}:
            _remove(self.folder / name)

    def _cut(self, done: int) -> None:
        """Leave what is of updates up to `done`: a run that goes on has one line for each."""
        for name in ("log.jsonl", "eval.jsonl"):
            rows = [row for row in read_jsonl(self.folder / name) if row["update"] <= done]
            write_jsonl(self.folder / name, rows)
        for path in (self.folder / "completions").glob("*-*.jsonl"):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and int(number) > done:
                path.unlink()

    def _remove_temporaries(self) -> None:
        """What a process of this run was writing when it was killed. A run has one at a time."""
        for name in (*_OWN, *_BESIDE):
            remove_temporaries(self.folder, name)
        for name in ("completions", "checkpoints"):
            remove_temporaries(self.folder / name)

    def sync(self) -> None:
        """Have the lines written to disk, before a checkpoint says that they are there."""
        for path in (self.folder / "log.jsonl", self.folder / "eval.jsonl"):
            if path.exists():
                sync(path)

    def write_update(self, line: dict[str, Any]) -> None:
        """Append to log.jsonl."""
        append_jsonl(self.folder / "log.jsonl", line)

    def write_evaluation(
        self, line: dict[str, Any], examples: Iterable[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        """Append to eval.jsonl and dump its completions; the same, which are read from there."""
        of = "" if line.get("set", THE_SET) == THE_SET else f"-{line['set']}"
        name = f"completions/eval{of}-{line['update']:06d}.jsonl"
        write_jsonl(self.folder / name, examples)
        append_jsonl(self.folder / "eval.jsonl", {**line, "completions": name})
        return Dumped(self.folder / name)

    def write_completions(self, update: int, completions: Iterable[dict[str, Any]]) -> None:
        """Dump the training completions of an update."""
        write_jsonl(self.folder / f"completions/train-{update:06d}.jsonl", completions)


class SilentLog(RunLog):
    """Of a process beside the main one: it knows the folder, and writes nothing."""

    def __init__(self, cfg: KeptConfig) -> None:
        self.folder = Path(cfg.misc.run_dir)

    def sync(self) -> None:
        """Nothing."""

    def write_update(self, line: dict[str, Any]) -> None:
        """Nothing."""

    def write_evaluation(
        self, line: dict[str, Any], examples: Iterable[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        """Nothing, and nothing to read."""
        return ()

    def write_completions(self, update: int, completions: Iterable[dict[str, Any]]) -> None:
        """Nothing."""


class Dumped(Sequence[dict[str, Any]]):
    """The objects of a file of `write_jsonl`, read each time they are asked for: a run has an
    evaluation many times over, and nobody looks at its completions before the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: Any) -> Any:
        return read_jsonl(self.path)[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(read_jsonl(self.path))

    def __len__(self) -> int:
        return len(read_jsonl(self.path))


class Clock:
    """Seconds of the parts of an update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Add what has passed since the last lap."""
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 3)
        self._last = now


def open_run_dir(misc: PlaceConfig) -> Path:
    """Make run_dir and write to it once, so that a folder that cannot be written to is told before
    anything is computed. Raises UserError."""
    folder = Path(misc.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"misc.run_dir: {folder}: {error.strerror or error}") from None
    return folder


def check_run_dir(cfg: KeptConfig, overwrite: bool | None = None) -> None:
    """Raise UserError if what stands in run_dir must not be replaced: the config does not say so
    (or `overwrite`, where it is given), or it is no run of the trainer, or the new run is made of
    it."""
    folder = Path(cfg.misc.run_dir)
    own = [name for name in _OWN if os.path.lexists(folder / name)]
    if not own:
        return
    if not (cfg.misc.overwrite if overwrite is None else overwrite):
        raise UserError(
            f"misc.run_dir: {folder} holds a run or other files ({', '.join(own)}); go on with it "
            "(--resume), choose another folder, or set misc.overwrite to true to replace a run"
        )
    if not (folder / "log.jsonl").is_file() and not _is_config(folder / "config.yaml", type(cfg)):  # type: ignore[arg-type]
        raise UserError(
            f"misc.run_dir: {folder} holds {', '.join(own)}, but neither log.jsonl nor a config of "
            "the trainer: it is no run, and is not replaced; choose another folder"
        )
    removed = [(folder / name).resolve() for name in own]
    for key, value in cfg.sources.items():
        place = Path(value or "").resolve()
        if value and any(place.is_relative_to(path) for path in removed):
            raise UserError(
                f"{key}: {value} lies in {folder}, which misc.overwrite would remove; choose "
                "another misc.run_dir"
            )


def _write_config(cfg: KeptConfig, folder: Path) -> None:
    save_config(cfg, folder / "config.yaml")  # type: ignore[arg-type]


def _remove(path: Path) -> None:
    """A file, or a folder with all that is in it: at once, whenever the process dies."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def _is_config(path: Path, kind: type[BaseModel]) -> bool:
    """Whether a run wrote it: with every section, where an empty file would be a config, too."""
    try:
        config = load_config(kind, path)
    except UserError:
        return False
    return config.model_fields_set == set(kind.model_fields)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that this module or a like one wrote; [] if there is none.

    Lines end at "\n" only: JSON may hold other line ends, which are part of a text. A last line
    that was cut (the run was killed while it wrote) is left out. Raises UserError that names file
    and line on anything else.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    lines = text.split("\n")
    torn = len(lines)  # what follows the last line end was not finished
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            if number == torn:
                break
            raise UserError(f"{path} line {number}: not a JSON object")
        rows.append(row)
    return rows


def append_jsonl(path: Path, line: dict[str, Any]) -> None:
    """One line more, so that a run that dies leaves what it knew."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(_json(line) + "\n")


def write_jsonl(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """A whole file, at once."""
    write_atomic(path, "".join(_json(line) + "\n" for line in lines))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """A file for programs that people may read, too."""
    write_atomic(path, json.dumps(values, indent=1, ensure_ascii=False))


def _json(line: dict[str, Any]) -> str:
    """One line of JSON. A figure that is not finite becomes null (NaN is not JSON), and the
    characters that `str.splitlines` takes for line ends are escaped."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
