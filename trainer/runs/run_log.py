"""The run directory, and the format of its files.

runs/<name>/
    config.yaml             the resolved config
    log.jsonl               one object for each update
    eval.jsonl              one object for each evaluation
    completions/            train-000001.jsonl, eval-000000.jsonl (of a set with a name,
                            eval-NAME-000000.jsonl): one object for each completion
    trajectories/           of a search run: trainer/search/trajectories/store.py
    buffer/                 what was generated for the next updates: trainer/runs/batches.py
        messages.log            the warnings of every start, with their time
    checkpoints/            step-000020/: see trainer/runs/checkpoints/checkpoint.py
        services.json           URL -> the `/v1/info` of the service there at the start
    trackers/               files of TensorBoard and other trackers (misc.trackers)
        report.html             all this as a page
    evaluation.json, .jsonl, .html
                            the report and the dump of `scorekit evaluate`; of a set with
                            a name, evaluation-NAME.json and so on
        comparison.json, .html  the same for another policy, whose evaluation is in against/

The task defines the lines: trainer/translation/dumps.py.
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
from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.files import remove_folder, remove_temporaries, sync, with_path_in_error, write_atomic
from scorekit.net.addresses import address_of
from scorekit.schemas import Info
from trainer.runs.config import DEFAULT_EVAL_SET, FolderConfig, KeptConfig

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_RUN_FILES = (
    "config.yaml",
    "log.jsonl",
    "eval.jsonl",
    "services.json",
    "completions",
    "trajectories",
    "buffer",
    "online_budget",
    "checkpoints",
    "trackers",
    "messages.log",
)
#: Files that the kinds of run add to the folder. Other commands (evaluate, report) write there,
#: too, at any time: temporary files of other names are not removed.
_TASK_FILES = ("data.json", "figures.json", "grpo.json", "index.json")


class RunLog:
    """Writes the run directory. Raises UserError as `check_run_dir` does.

    It replaces only files that this class writes.
    """

    def __init__(
        self,
        cfg: KeptConfig,
        services: Mapping[str, Info] | None = None,
        *,
        resume: bool = False,
        done: int | None = None,
    ) -> None:
        """Start the files of a new run, or cut those of a resumed one.

        resume: replace an earlier run whatever misc.overwrite says, and keep its trajectories:
        they have its name, by which its paid calls count.
        done: resume after this update; None: start from the beginning.
        """
        self.folder = Path(cfg.misc.run_dir)
        if done is None:
            check_run_dir(cfg, resume or None)
            self._start(cfg, {"trajectories"} if resume else set())
        else:
            self._cut(done)
            save_config(cfg, self.folder / "config.yaml")
        self._remove_temporaries()
        if services is not None:
            infos = {address_of(u): info.model_dump(mode="json") for u, info in services.items()}
            write_atomic(self.folder / "services.json", json.dumps(infos, indent=1))

    def _start(self, cfg: KeptConfig, remaining: set[str]) -> None:
        """Remove an earlier run: its checkpoints first and by a rename, its config last.

        So the folder of a process that dies is always a run, and never this one with the other's
        checkpoints.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove(self.folder / "checkpoints")
        save_config(cfg, self.folder / "config.yaml")
        for name in set(_RUN_FILES) - {"checkpoints", "config.yaml"} - remaining:
            _remove(self.folder / name)

    def _cut(self, done: int) -> None:
        """Remove what belongs to updates after `done`: a resumed run has one line for each."""
        for name in ("log.jsonl", "eval.jsonl"):
            rows = [row for row in read_jsonl(self.folder / name) if row["update"] <= done]
            write_jsonl(self.folder / name, rows)
        for path in (self.folder / "completions").glob("*-*.jsonl"):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and int(number) > done:
                path.unlink()

    def _remove_temporaries(self) -> None:
        """Remove partial files of a killed process. A run has one process at a time."""
        for name in (*_RUN_FILES, *_TASK_FILES):
            remove_temporaries(self.folder, name)
        for name in ("completions", "checkpoints"):
            remove_temporaries(self.folder / name)

    def sync(self) -> None:
        """Flush the lines to disk, before a checkpoint refers to them."""
        for path in (self.folder / "log.jsonl", self.folder / "eval.jsonl"):
            if path.exists():
                sync(path)

    def write_update(self, line: dict[str, Any]) -> None:
        """Append to log.jsonl."""
        append_jsonl(self.folder / "log.jsonl", line)

    def write_evaluation(
        self, line: dict[str, Any], examples: Iterable[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        """Append to eval.jsonl, dump the completions, and return them as read from the file."""
        set_suffix = (
            "" if line.get("set", DEFAULT_EVAL_SET) == DEFAULT_EVAL_SET else f"-{line['set']}"
        )
        name = f"completions/eval{set_suffix}-{line['update']:06d}.jsonl"
        write_jsonl(self.folder / name, examples)
        append_jsonl(self.folder / "eval.jsonl", {**line, "completions": name})
        return JsonlFile(self.folder / name)

    def write_completions(self, update: int, completions: Iterable[dict[str, Any]]) -> None:
        """Dump the training completions of an update."""
        write_jsonl(self.folder / f"completions/train-{update:06d}.jsonl", completions)


class JsonlFile(Sequence[dict[str, Any]]):
    """The objects of a file of `write_jsonl`, read on each access.

    A run has many evaluations, and their completions are not needed before its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: Any) -> Any:
        return read_jsonl(self.path)[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(read_jsonl(self.path))

    def __len__(self) -> int:
        return len(read_jsonl(self.path))


class PhaseTimer:
    """Seconds of the phases of an update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Add the time since the last lap."""
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 3)
        self._last = now


def open_run_dir(misc: FolderConfig) -> Path:
    """Create run_dir and write to it once, so that errors come before the computation.

    Raises UserError.
    """
    folder = Path(misc.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"misc.run_dir: {folder}: {error.strerror or error}") from None
    return folder


def check_run_dir(cfg: KeptConfig, overwrite: bool | None = None) -> None:
    """Raise UserError if the contents of run_dir must not be replaced.

    That is so if the config (or `overwrite`) does not allow it, if they are no run of the trainer,
    or if the new run reads from them.
    """
    folder = Path(cfg.misc.run_dir)
    existing = [name for name in _RUN_FILES if os.path.lexists(folder / name)]
    if not existing:
        return
    if not (cfg.misc.overwrite if overwrite is None else overwrite):
        raise UserError(
            f"misc.run_dir: {folder} has a run or other files ({', '.join(existing)}). Resume it "
            "(--resume), choose another folder, or set misc.overwrite to true to replace a run"
        )
    if not (folder / "log.jsonl").is_file() and not _is_config(folder / "config.yaml", type(cfg)):
        raise UserError(
            f"misc.run_dir: {folder} has {', '.join(existing)}, but neither log.jsonl nor a config "
            "of the trainer. It is no run and is not replaced. Choose another folder"
        )
    removed = [(folder / name).resolve() for name in existing]
    for key, value in cfg.sources.items():
        source = Path(value or "").resolve()
        if value and any(source.is_relative_to(path) for path in removed):
            raise UserError(
                f"{key}: {value} is in {folder}, which misc.overwrite would remove. Choose another "
                "misc.run_dir"
            )


def _remove(path: Path) -> None:
    """Remove a file, or a folder by a rename first, so that it never remains in part."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def _is_config(path: Path, kind: type[BaseModel]) -> bool:
    """Return whether a run wrote it, with every section; an empty file is a valid config, too."""
    try:
        config = load_config(kind, path)
    except UserError:
        return False
    return config.model_fields_set == set(kind.model_fields)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file; [] if it does not exist.

    Lines end at "\n" only: JSON may have other line ends, which are part of a text. An incomplete
    last line (the run was killed while it wrote) is left out. Raises UserError that names file and
    line on any other error.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    lines = text.split("\n")
    torn = len(lines)  # the text after the last line end is incomplete
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            if number == torn:
                break
            raise UserError(f"{path} line {number}: not a JSON object")
        rows.append(row)
    return rows


def append_jsonl(path: Path, line: dict[str, Any]) -> None:
    """Append a line at once, so that it survives if the run dies."""
    with with_path_in_error(path), path.open("a", encoding="utf-8") as file:
        file.write(_json(line) + "\n")


def write_jsonl(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a complete file by a rename."""
    write_atomic(path, "".join(_json(line) + "\n" for line in lines))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an indented JSON file by a rename."""
    write_atomic(path, json.dumps(values, indent=1, ensure_ascii=False))


def _json(line: dict[str, Any]) -> str:
    """Return one line of JSON.

    A stat that is not finite becomes null (NaN is not JSON), and the characters that
    `str.splitlines` takes for line ends are escaped.
    """
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
