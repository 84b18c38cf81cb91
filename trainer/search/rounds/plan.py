"""Build and check the configs of all steps of a loop before the first step starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from scorekit.config import check_config, read_config
from scorekit.errors import UserError
from trainer.runs.config import KeptConfig, pinned_settings
from trainer.search.config import SearchConfig
from trainer.search.rounds.config import RoundConfig, RoundsConfig
from trainer.search.steps.asking import merge_settings
from trainer.search.steps.config import CurationConfig
from trainer.search.steps.table import step as step_of
from trainer.sft.config import SftConfig
from trainer.sft.curation_record import FILE

#: File of paid answers in the loop's folder, which all curation commands share.
ANSWERS = "answers.sqlite"
_FILES = {".jsonl", ".json", ".parquet", ".jinja"}
#: Keys that a resumed run may change, but not a loop: its inputs and its length.
_READ = ("policy.path", "data.train", "data.train_split", "data.train_limit")
_LENGTH = ("rl.num_updates", "rl.epochs")
#: Keys that only the loop sets, by the section of rounds.yaml.
_LOOP_KEYS = {
    "curation": _READ[1:],
    "sft": ("data.train", "data.record", "policy.path", "misc.run_dir"),
    "train": ("misc.run_dir",),
}


@dataclass(slots=True)
class LoopState:
    """The state before a step.

    data: config section of all questions.
    rows: file of questions for the next training; None: all questions.
    buckets, focused: folders of the last buckets and focus.
    policy: the next start.
    runs: run directories so far, in order.
    record: folder of the last step with decisions about rows, which includes all earlier ones.
    """

    data: dict[str, Any]
    policy: str
    rows: str | None = None
    buckets: Path | None = None
    focused: Path | None = None
    runs: list[Path] = field(default_factory=list)
    record: Path | None = None

    def update(self, moves: Collection[str], folder: Path) -> None:
        """Take over what a step has left in its folder.

        moves: of the step.
        """
        rows = str(folder / "rows.jsonl")
        if "data" in moves:
            self.data = {"train": rows}
        if "rows" in moves:
            self.rows = rows
        for name in {"buckets", "focused", "record"} & set(moves):
            setattr(self, name, folder)


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The config of a loop and its output folder."""

    cfg: RoundsConfig
    out: Path

    def folder(self, round_cfg: RoundConfig) -> Path:
        """Return the folder of a round: its number and its name."""
        return self.out / f"{self.cfg.rounds.index(round_cfg) + 1:02d}-{round_cfg.name}"

    def training(self, round_cfg: RoundConfig, state: LoopState | None = None) -> SearchConfig:
        """Return the config of a round's training.

        state: None before the first round. Raises UserError.
        """
        if round_cfg.config is not None and not Path(round_cfg.config).is_file():
            raise UserError(
                f"rounds: {round_cfg.name}: config: {round_cfg.config}: no such file here. The "
                "path counts from the folder that you start in: start elsewhere, or give a whole "
                "path"
            )
        settings = merge_settings(
            read_config(round_cfg.config), merge_settings(self.cfg.train, round_cfg.train)
        )
        loop_settings: dict[str, Any] = {"misc": {"run_dir": str(self.folder(round_cfg) / "train")}}
        if state is not None:
            loop_settings["policy"] = {"path": state.policy}
            if state.runs:  # an exported policy has its own tokenizer
                loop_settings["policy"] |= {"revision": None, "tokenizer": None}
            all_rows = {"train_split": None, "train_limit": None}
            rows = state.data if state.rows is None else {"train": state.rows}
            loop_settings["data"] = all_rows | rows
        return check_config(
            SearchConfig, merge_settings(settings, loop_settings), f"{round_cfg.name}: training"
        )

    def curation(self, round_cfg: RoundConfig, state: LoopState | None = None) -> CurationConfig:
        """Return the config of a round's curation commands, with the servers of its training."""
        training = self.training(round_cfg)
        servers = {
            name: getattr(training, name).model_dump(mode="json", exclude_unset=True)
            for name in ("answering", "retriever")
        }
        settings = merge_settings(servers, merge_settings(self.cfg.curation, round_cfg.curation))
        loop_settings: dict[str, Any] = {"data": state.data} if state is not None else {}
        if settings.get("answers") is None:
            loop_settings["answers"] = str(self.out / ANSWERS)
        return check_config(
            CurationConfig, merge_settings(settings, loop_settings), f"{round_cfg.name}: curation"
        )

    def finetuning(
        self,
        round_cfg: RoundConfig,
        policy: str,
        rows: Path,
        longest: int,
        record: Path | None = None,
    ) -> SftConfig:
        """Return the config of a round's SFT.

        longest: max tokens of a row, the default of data.max_length.
        record: folder with the decisions about rows.
        """
        settings = merge_settings(
            {"data": {"max_length": longest}}, merge_settings(self.cfg.sft, round_cfg.sft)
        )
        loop_settings = {
            "task": "sft",
            "policy": {"path": policy},
            "data": {"train": str(rows), "record": record and str(record / FILE)},
            "misc": {"run_dir": str(self.folder(round_cfg) / "sft")},
        }
        return check_config(
            SftConfig, merge_settings(settings, loop_settings), f"{round_cfg.name}: sft"
        )


def check_plan(plan: LoopPlan) -> LoopState:
    """Check all configs before the first step and return the first state. Raises UserError."""
    for round_cfg in plan.cfg.rounds:
        _check_ours(plan.cfg, round_cfg)
        training, curation = plan.training(round_cfg), plan.curation(round_cfg)
        plan.finetuning(round_cfg, "policy", Path("rows.jsonl"), 1)
        _check_models(round_cfg, training, curation)
        _check_data(round_cfg, training, is_from_loop=round_cfg is not plan.cfg.rounds[0])
    first_training = plan.training(plan.cfg.rounds[0])
    if first_training.data.train is None or first_training.policy.path is None:
        key = "data.train" if first_training.data.train is None else "policy.path"
        raise UserError(
            f"{plan.cfg.rounds[0].name}: {key}: not set, but required to start the loop"
        )
    names = ("train", "train_split", "train_limit")
    data = {name: getattr(first_training.data, name) for name in names}
    return LoopState(data, first_training.policy.path)


def _check_ours(cfg: RoundsConfig, round_cfg: RoundConfig) -> None:
    """Raise UserError for keys that only the loop sets, such as a round's rows and policy."""
    for key in _READ if round_cfg is not cfg.rounds[0] else ():  # the first round defines the start
        if _value_at(round_cfg.train, key) is not None:
            raise UserError(
                f"{round_cfg.name}: train.{key}: a later round uses the rows and the policy of the "
                "round before it. Remove the key, or start another loop."
            )
    for section, keys in _LOOP_KEYS.items():
        for sections in (getattr(cfg, section), getattr(round_cfg, section)):
            for key in keys:
                name = key.split(".")[0]
                if not isinstance(sections.get(name, {}), Mapping):
                    raise UserError(
                        f"{round_cfg.name}: {section}.{name}: expected a mapping of keys"
                    )
                if _value_at(sections, key) is not None:
                    raise UserError(
                        f"{round_cfg.name}: {section}.{key}: only the loop sets it. Remove the key."
                    )


def _value_at(sections: Mapping[str, Any], key: str) -> Any:
    section, name = key.split(".")
    values = sections.get(section)
    return values.get(name) if isinstance(values, Mapping) else None


def _check_data(round_cfg: RoundConfig, training: SearchConfig, *, is_from_loop: bool) -> None:
    """Raise UserError if an input file is missing.

    is_from_loop: the loop sets data.train.
    """
    if training.data.columns:
        raise UserError(
            f"{round_cfg.name}: data.columns: the loop uses the standard names of columns. "
            "Rename the columns of your files (docs/how-to/train-search.md) and remove the key."
        )
    for key, path in training.sources.items():
        if path is None or (is_from_loop and key == "data.train"):
            continue
        if Path(path).suffix in _FILES and not Path(path).exists():
            raise UserError(f"{round_cfg.name}: {key}: {path}: the file does not exist")


def _check_models(round_cfg: RoundConfig, training: SearchConfig, curation: CurationConfig) -> None:
    steps = [step_of(name) for name in round_cfg.then if name != "sft"]
    for step in steps:
        if (error := step.loop_error(curation, training.answering)) is not None:
            raise UserError(f"{round_cfg.name}: {step.name}: {error}")
        if "generator" in step.asks and not curation.answering.generator.model:
            raise UserError(
                f"{round_cfg.name}: {step.name}: requires the generator. Set base_url and model of "
                "train.answering.generator."
            )


def settings_of(
    step: str, cfg: BaseModel, out: Path, flags: Sequence[object] = ()
) -> dict[str, Any]:
    """Return the settings of a step that may not change after it is done.

    Addresses and rates of servers may change. Paths in the loop's folder `out` are relative to it.
    """
    if isinstance(cfg, CurationConfig):
        sections = [step, *step_of(step).also]
        settings = _keys(cfg, sections) | {"read": [_from(out, flag) for flag in flags]}
        paths = [*_READ[1:], *step_of(step).paths]
    elif isinstance(cfg, SearchConfig):
        settings, paths = pinned_settings(cfg) | _values_at(cfg, _LENGTH), [*_READ]
    else:
        settings = pinned_settings(cfg) | _keys(cfg, ["data"], free=False)
        paths = ["policy.path", "data.train", "data.record"]
    return settings | {key: _from(out, value) for key, value in _values_at(cfg, paths).items()}


def with_new_keys(
    recorded: Mapping[str, Any], settings: Mapping[str, Any], step: str, cfg: BaseModel
) -> dict[str, Any]:
    """Return recorded settings with the keys that an earlier version did not have.

    Their values are what it did: the defaults.
    settings, cfg: of the step now.
    """
    earlier_cfg = cfg.of_run({}) if isinstance(cfg, KeptConfig) else type(cfg)()
    defaults = settings_of(step, earlier_cfg, Path())
    return {key: defaults[key] for key in settings if key in defaults} | dict(recorded)


def _keys(cfg: BaseModel, sections: Sequence[str], *, free: bool = True) -> dict[str, Any]:
    """Return `section.key` -> value.

    free: without the keys that may change.
    """
    values: dict[str, Any] = {}
    for section in sections:
        section_cfg = getattr(cfg, section)
        section_values = (
            pinned_settings(section_cfg) if free else section_cfg.model_dump(mode="json")
        )
        values |= {f"{section}.{key}": value for key, value in section_values.items()}
    return values


def _values_at(cfg: BaseModel, keys: Sequence[str]) -> dict[str, Any]:
    return {key: attrgetter(key)(cfg) for key in keys}


def _from(out: Path, value: Any) -> Any:
    """Return a path in `out` relative to it, as OUT/..., and another value unchanged."""
    if not isinstance(value, (str, Path)):
        return value
    path, folder = Path(os.path.abspath(value)), Path(os.path.abspath(out))
    return f"OUT/{path.relative_to(folder)}" if path.is_relative_to(folder) else str(value)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[str]:
    """Return the keys that differ, with both values."""
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key)!r} then, {after.get(key)!r} now" for key in keys]
