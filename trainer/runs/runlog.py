"""The folder of a run, and the format of what stands in it.

runs/<name>/
    config.yaml             the resolved config
    log.jsonl               one object for each update
    eval.jsonl              one object for each evaluation
    completions/            train-000001.jsonl, eval-000000.jsonl (of a set with a name,
                            eval-NAME-000000.jsonl): one object for each completion
    messages.log            the warnings of every start, with their time: what was left out, or
                            waited for, which settings have changed, why it ended
    checkpoints/            step-000020/: see trainer/runs/checkpoint.py
    services.json           URL -> what `/v1/info` of the service there said at the start
    trackers/               files of TensorBoard and other trackers (misc.trackers)
    report.html             all this, for eyes
    evaluation.json, .jsonl, .html
                            the report and the dump of `python -m trainer evaluate`; of a set with
                            a name, evaluation-NAME.json and so on
    comparison.json, .html  the same against another policy, whose evaluation stands in against/

**log.jsonl.** `update` (from 1), `skipped` (true: nothing was learned, since no sample was scored
or no optimiser step could be taken), `lr`, the figures of trainer/translation/evaluation/figures.py (rollout, reward,
advantage), of `TrainStats` (policy_loss, approx_kl, clip_frac, kl_ref, grad_norm, ...), and
seconds: `rollout_s` (sampling), `logprob_s` (the trainer's own forward passes over the rollouts,
while rewards are awaited), `reward_s` (what is left to wait for then, in all `attempts`: more than
one where the services gave no score at first), `update_s`. `kl_ref` is the
mean of new - ref, `kl_ref_k3` its estimate that is never negative. Every line has every key; a
figure that does not exist is null, such as those of a service that was not asked, or the loss of a
skipped update. Every mean of scores stands beside its coverage (scored / asked; 0 of a service that
was away).
`metricx_truncated_frac` and `xcomet_truncated_frac` are the share of the scored samples whose
source or translation the model could not read to its end (`truncated_frac`: completions that
max_new_tokens cut). `stopped`: why the run ended with this update, by a rule of the section `stop`;
else null.
`text_errors` counts the samples that cannot be scored by their own fault, `source_errors` those of
a source that no translation helps (no reward, no part in the update); `overlong_truncated`,
`overlong_skipped` and `overlong_penalised` those over a model's limit, by what became of them.
`uncovered_tokens` counts the tokens behind what the span model read (`reward.uncovered`); `kl_ref`
and `kl_ref_k3` are over them, too. `reward_mean`: sequence reward and mean token reward together.
`guard_*_mean` is the mean fault that a guard found, over all samples; null of a guard that is off.

**eval.jsonl.** A line for each set of examples: `update` (0: before training), `set` (its name;
`eval`: that of `data.eval`), `decides` (whether the best checkpoint is chosen by its
`reward_mean`), `seconds`, `completions` (the dump's path within the folder), and the fields of
`trainer.translation.evaluation.evaluate.Report`; `pairs` holds them for each language pair where there are several.

**completions/eval-*.jsonl.** `id`, `pair` (languages, "en-US>ko-KR"), `src`, `mt`, `ref` (null
without one), `tokens`, `finish_reason`, `metricx_score`, `xcomet_score`, `metricx_truncated`,
`xcomet_truncated` (whether the model read less than the whole source and translation), `chrf` (of
the segment; null where there is none), `error_spans` (list of `start`, `end`, `severity`,
`confidence` (null: unknown), `text`; null if not asked), `guards` (guard -> fault), `error` (why it
has no score, else null). The order is that of the examples in every dump of a run, so that line k
before and line k after translate the same source.

**completions/train-*.jsonl.** The same fields without `ref` and `chrf`, and `r_seq`,
`token_char_offsets`, `token_rewards`, `advantages` (null for a sample that was left out).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scorekit.config import load_config, save_config
from scorekit.errors import UserError
from scorekit.schemas import Info
from trainer.rl.advantage import TokenAdvantages
from trainer.translation.config import TrainerConfig
from trainer.translation.config_data import THE_SET
from trainer.translation.data import set_key
from trainer.translation.rewards.formula import SampleReward
from trainer.rl.sampler import Rollout

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_OWN = (
    "config.yaml", "log.jsonl", "eval.jsonl", "services.json", "completions", "checkpoints",
    "trackers", "messages.log",
)  # fmt: skip


class RunLog:
    """Writes the folder of a run. Raises UserError as `check_run_dir` does; only what this class
    writes is replaced."""

    def __init__(
        self,
        cfg: TrainerConfig,
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
        infos = {url: info.model_dump(mode="json") for url, info in (services or {}).items()}
        write_text(self.folder / "services.json", json.dumps(infos, indent=1))

    def _start(self, cfg: TrainerConfig) -> None:
        """Remove an earlier run: its checkpoints first and at once, its config last, so that what a
        process that dies leaves is always a run, and never this one with checkpoints of that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove(self.folder / "checkpoints")
        _write_config(cfg, self.folder)
        for name in set(_OWN) - {"checkpoints", "config.yaml"}:
            _remove(self.folder / name)
        (self.folder / "completions").mkdir()

    def _cut(self, done: int) -> None:
        """Leave what is of updates up to `done`: a run that goes on has one line for each."""
        for name in ("log.jsonl", "eval.jsonl"):
            rows = [row for row in read_jsonl(self.folder / name) if row["update"] <= done]
            write_jsonl(self.folder / name, rows)
        (self.folder / "completions").mkdir(exist_ok=True)
        for path in (self.folder / "completions").glob("*-*.jsonl"):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and int(number) > done:
                path.unlink()

    def sync(self) -> None:
        """Have the lines written to disk, before a checkpoint says that they are there."""
        for path in (self.folder / "log.jsonl", self.folder / "eval.jsonl"):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def write_update(self, line: dict[str, Any]) -> None:
        """Append to log.jsonl."""
        append_jsonl(self.folder / "log.jsonl", line)

    def write_evaluation(self, line: dict[str, Any], examples: Iterable[dict[str, Any]]) -> None:
        """Append to eval.jsonl and dump its completions."""
        of = "" if line.get("set", THE_SET) == THE_SET else f"-{line['set']}"
        name = f"completions/eval{of}-{line['update']:06d}.jsonl"
        write_jsonl(self.folder / name, examples)
        append_jsonl(self.folder / "eval.jsonl", {**line, "completions": name})

    def write_completions(self, update: int, completions: Iterable[dict[str, Any]]) -> None:
        """Dump the training completions of an update."""
        write_jsonl(self.folder / f"completions/train-{update:06d}.jsonl", completions)


class SilentLog(RunLog):
    """Of a process beside the main one: it knows the folder, and writes nothing."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self.folder = Path(cfg.misc.run_dir)

    def sync(self) -> None:
        """Nothing."""

    def write_update(self, line: dict[str, Any]) -> None:
        """Nothing."""

    def write_evaluation(self, line: dict[str, Any], examples: Iterable[dict[str, Any]]) -> None:
        """Nothing."""

    def write_completions(self, update: int, completions: Iterable[dict[str, Any]]) -> None:
        """Nothing."""


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


def open_run_dir(cfg: TrainerConfig) -> Path:
    """Make run_dir and write to it once, so that a folder that cannot be written to is told before
    anything is computed. Raises UserError."""
    folder = Path(cfg.misc.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"misc.run_dir: {folder}: {error.strerror or error}") from None
    return folder


def check_run_dir(cfg: TrainerConfig, overwrite: bool | None = None) -> None:
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
    if not (folder / "log.jsonl").is_file() and not _is_config(folder / "config.yaml"):
        raise UserError(
            f"misc.run_dir: {folder} holds {', '.join(own)}, but neither log.jsonl nor a config of "
            "the trainer: it is no run, and is not replaced; choose another folder"
        )
    removed = [(folder / name).resolve() for name in own]
    for key, value in _sources(cfg).items():
        place = Path(value or "").resolve()
        if value and any(place.is_relative_to(path) for path in removed):
            raise UserError(
                f"{key}: {value} lies in {folder}, which misc.overwrite would remove; choose "
                "another misc.run_dir"
            )


def _write_config(cfg: TrainerConfig, folder: Path) -> None:
    save_config(cfg, folder / ".config.yaml.partial")
    (folder / ".config.yaml.partial").replace(folder / "config.yaml")


def _remove(path: Path) -> None:
    """A file, or a folder with all that is in it: at once, whenever the process dies."""
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f".{path.name}.removed")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


def _is_config(path: Path) -> bool:
    """Whether a run wrote it: with every section, where an empty file would be a config, too."""
    try:
        config = load_config(TrainerConfig, path)
    except UserError:
        return False
    return config.model_fields_set == set(TrainerConfig.model_fields)


def _sources(cfg: TrainerConfig) -> dict[str, str | None]:
    """What a run reads."""
    return {
        "policy.path": cfg.policy.path,
        "policy.tokenizer": cfg.policy.tokenizer,
        "policy.reference_path": cfg.policy.reference_path,
        "data.train": cfg.data.train,
        **{set_key(name): of.path for name, of in cfg.data.held_out.items()},
        "generation.prompt_template": cfg.generation.prompt_template,
    }


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
    with path.open("a", encoding="utf-8") as file:
        file.write(_json(line) + "\n")


def write_jsonl(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """A whole file, at once."""
    write_text(path, "".join(_json(line) + "\n" for line in lines))


def write_text(path: Path, text: str) -> None:
    """A whole file, at once: who dies meanwhile leaves the old one, or none."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _json(line: dict[str, Any]) -> str:
    """One line of JSON. A figure that is not finite becomes null (NaN is not JSON), and the
    characters that `str.splitlines` takes for line ends are escaped."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)


def completion_line(rollout: Rollout, reward: SampleReward) -> dict[str, Any]:
    """The fields that evaluation and training dumps share."""
    spans = reward.error_spans
    return {
        "id": rollout.example_id,
        "pair": rollout.pair,
        "src": rollout.src_text,
        "mt": rollout.completion_text,
        "tokens": len(rollout.completion_token_ids),
        "finish_reason": rollout.finish_reason,
        "metricx_score": reward.metricx_score,
        "xcomet_score": reward.xcomet_score,
        "metricx_truncated": reward.metricx_truncated,
        "xcomet_truncated": reward.xcomet_truncated,
        "error_spans": None if spans is None else [span.model_dump() for span in spans],
        "guards": reward.guards,
        "error": reward.source_error
        or reward.text_error
        or reward.service_error
        or reward.shown_error,
    }


def training_lines(
    rollouts: list[Rollout],
    rewards: list[SampleReward],
    kept: list[int],
    advantages: TokenAdvantages | None,
) -> Iterable[dict[str, Any]]:
    """Lines of a training dump. `kept`: indices of the samples that `advantages` has rows for."""
    rows = {index: row for row, index in enumerate(kept)} if advantages is not None else {}
    for index, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        values = None
        if advantages is not None and index in rows:
            row = advantages.values[rows[index], : len(rollout.completion_token_ids)]
            values = [round(value, 6) for value in row.tolist()]
        yield {
            **completion_line(rollout, reward),
            "r_seq": reward.r_seq,
            "token_char_offsets": rollout.token_char_offsets,
            "token_rewards": reward.token_rewards,
            "advantages": values,
        }
