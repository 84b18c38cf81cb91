"""The configs of a loop's steps, each made and checked before the first step begins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from scorekit.config import check_config, read_config
from scorekit.errors import UserError
from trainer.runs.config import lasting
from trainer.search.config import SearchConfig
from trainer.search.curation.asking import merged
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.verification.verifier import check_independent
from trainer.search.rounds.config import RoundConfig, RoundsConfig
from trainer.sft.config import SftConfig
from trainer.sft.curation_record import FILE

C = TypeVar("C", bound=BaseModel)
#: Of the paid answers that all commands between the trainings share, in the loop's folder.
ANSWERS = "answers.sqlite"
_FILES = {".jsonl", ".json", ".parquet", ".jinja"}
#: Keys that a run may change as it goes on, and a loop not: what it reads, how long it learns.
_READ = ("policy.path", "data.train", "data.train_split", "data.train_limit")
_LENGTH = ("rl.num_updates", "rl.epochs")
#: Keys that nobody else sets, by the section of rounds.yaml.
_OURS = {
    "curation": _READ[1:],
    "sft": ("data.train", "data.record", "policy.path", "misc.run_dir"),
    "train": ("misc.run_dir",),
}
#: Of a command of curation besides its own section.
_ALSO = {
    "focus": ("buckets",),
    "hallucinations": ("answering",),
    "budget": ("buckets",),
    "alternatives": ("answering",),
    "verify": ("answering", "distill"),
}
_ASKS_GENERATOR = ("alternatives", "hallucinations", "verify")


@dataclass(slots=True)
class Standing:
    """What is there before a step. data: section of all questions, as it stands in a config.
    rows: file that the next training plays; None: all questions. focused: folder of the last focus.
    policy: that it begins with. runs: folders so far, in the order of the rounds. record: folder of
    the last step that decided about rows, with all decisions before it."""

    data: dict[str, Any]
    policy: str
    rows: str | None = None
    focused: Path | None = None
    runs: list[Path] = field(default_factory=list)
    record: Path | None = None


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """rounds.yaml and the folder that it fills."""

    cfg: RoundsConfig
    out: Path

    def folder(self, of: RoundConfig) -> Path:
        """Of a round: its place and its name."""
        return self.out / f"{self.cfg.rounds.index(of) + 1:02d}-{of.name}"

    def training(self, of: RoundConfig, standing: Standing | None = None) -> SearchConfig:
        """The config of a round's training. standing: None before the first."""
        told = merged(read_config(of.config), merged(self.cfg.train, of.train))
        ours: dict[str, Any] = {"misc": {"run_dir": str(self.folder(of) / "train")}}
        if standing is not None:
            ours["policy"] = {"path": standing.policy}
            if standing.runs:  # it is a folder of ours, with a tokenizer of its own
                ours["policy"] |= {"revision": None, "tokenizer": None}
            whole = {"train_split": None, "train_limit": None}
            rows = standing.data if standing.rows is None else {"train": standing.rows}
            ours["data"] = whole | rows
        return _checked(SearchConfig, merged(told, ours), f"{of.name}: training")

    def curation(self, of: RoundConfig, standing: Standing | None = None) -> CurationConfig:
        """The config of the commands behind it: servers are those of its training, wherever they
        are by now."""
        training = self.training(of)
        servers = {
            name: getattr(training, name).model_dump(mode="json", exclude_unset=True)
            for name in ("answering", "retriever")
        }
        told = merged(servers, merged(self.cfg.curation, of.curation))
        ours: dict[str, Any] = {"data": standing.data} if standing is not None else {}
        if told.get("answers") is None:
            ours["answers"] = str(self.out / ANSWERS)
        return _checked(CurationConfig, merged(told, ours), f"{of.name}: curation")

    def finetuning(
        self, of: RoundConfig, policy: str, rows: Path, longest: int, record: Path | None = None
    ) -> SftConfig:
        """The config of its SFT. longest: tokens of a row, for which there is room unless the
        sections say otherwise. record: folder with what was decided about rows."""
        told = merged({"data": {"max_length": longest}}, merged(self.cfg.sft, of.sft))
        ours = {
            "task": "sft",
            "policy": {"path": policy},
            "data": {"train": str(rows), "record": record and str(record / FILE)},
            "misc": {"run_dir": str(self.folder(of) / "sft")},
        }
        return _checked(SftConfig, merged(told, ours), f"{of.name}: sft")


def check_plan(plan: LoopPlan) -> Standing:
    """Look at all that can be known before the first step; gives where the loop begins. Raises
    UserError."""
    for of in plan.cfg.rounds:
        _check_ours(plan.cfg, of)
        training, curation = plan.training(of), plan.curation(of)
        plan.finetuning(of, "policy", Path("rows.jsonl"), 1)
        _check_models(of, training, curation)
        _check_data(of, training, ours=of is not plan.cfg.rounds[0])
    first = plan.training(plan.cfg.rounds[0])
    if first.data.train is None or first.policy.path is None:
        key = "data.train" if first.data.train is None else "policy.path"
        raise UserError(f"{plan.cfg.rounds[0].name}: {key}: not set: the loop begins with it")
    names = ("train", "train_split", "train_limit")
    data = {name: getattr(first.data, name) for name in names}
    return Standing(data, first.policy.path)


def _check_ours(cfg: RoundsConfig, of: RoundConfig) -> None:
    """What only the loop says: where a round's rows and policy come from."""
    for key in _READ if of is not cfg.rounds[0] else ():  # the first says where the loop begins
        if _at(of.train, key) is not None:
            raise UserError(
                f"{of.name}: train.{key}: a later round plays what the round before it has kept, "
                "from the policy that it has left: leave it out, or begin another loop"
            )
    for section, keys in _OURS.items():
        for told in (getattr(cfg, section), getattr(of, section)):
            for key in keys:
                name = key.split(".")[0]
                if not isinstance(told.get(name, {}), Mapping):
                    raise UserError(f"{of.name}: {section}.{name}: keys with values belong here")
                if _at(told, key) is not None:
                    raise UserError(f"{of.name}: {section}.{key}: is the loop's own: leave it out")


def _at(told: Mapping[str, Any], key: str) -> Any:
    section, name = key.split(".")
    of = told.get(section)
    return of.get(name) if isinstance(of, Mapping) else None


def _check_data(of: RoundConfig, training: SearchConfig, *, ours: bool) -> None:
    """ours: whether the loop says what is played."""
    if training.data.columns:
        raise UserError(
            f"{of.name}: data.columns: the loop writes rows under our own names, and reads "
            "them again: rename the columns of your files first (docs/search.md), and leave "
            "it out"
        )
    for key, path in training.sources.items():
        if path is None or (ours and key == "data.train"):
            continue
        if Path(path).suffix in _FILES and not Path(path).exists():
            raise UserError(f"{of.name}: {key}: {path}: no such file")


def _check_models(of: RoundConfig, training: SearchConfig, curation: CurationConfig) -> None:
    if "verify" in of.then:
        verifier = curation.verify.verifier
        if not (verifier.base_url and verifier.model):
            raise UserError(
                f"{of.name}: verify: curation.verify.verifier: base_url and model are not set"
            )
        check_independent(verifier, training.answering.generator)
    for name in _ASKS_GENERATOR:
        if name in of.then and not curation.answering.generator.model:
            raise UserError(
                f"{of.name}: {name}: asks the generator: set train.answering.generator.base_url "
                "and .model"
            )
    if "rewrite" in of.then and not curation.rewrite.rewriter.model:
        raise UserError(f"{of.name}: rewrite: curation.rewrite.rewriter.model: not set")


def settings_of(
    step: str, cfg: BaseModel, out: Path, flags: Sequence[object] = ()
) -> dict[str, Any]:
    """What a step that is done was made with, as it may not change afterwards: not where servers
    are, nor how fast they are asked. Paths within the loop's folder `out` are told from there."""
    if isinstance(cfg, CurationConfig):
        sections = [step, *_ALSO.get(step, ())]
        told = _keys(cfg, sections) | {"read": [_from(out, flag) for flag in flags]}
        paths = [*_READ[1:], *(["distill.model"] if step == "distill" else [])]
    elif isinstance(cfg, SearchConfig):
        told, paths = lasting(cfg) | _at_all(cfg, _LENGTH), [*_READ]
    else:
        told = lasting(cfg) | _keys(cfg, ["data"], free=False)
        paths = ["policy.path", "data.train", "data.record"]
    return told | {key: _from(out, value) for key, value in _at_all(cfg, paths).items()}


def _keys(cfg: BaseModel, sections: Sequence[str], *, free: bool = True) -> dict[str, Any]:
    """`section.key` -> value; free: without those that may change."""
    found: dict[str, Any] = {}
    for section in sections:
        of = getattr(cfg, section)
        told = lasting(of) if free else of.model_dump(mode="json")
        found |= {f"{section}.{key}": value for key, value in told.items()}
    return found


def _at_all(cfg: BaseModel, keys: Sequence[str]) -> dict[str, Any]:
    return {key: attrgetter(key)(cfg) for key in keys}


def _from(out: Path, value: Any) -> Any:
    """A path within `out` as one from there, wherever both are."""
    if not isinstance(value, (str, Path)):
        return value
    path, folder = Path(os.path.abspath(value)), Path(os.path.abspath(out))
    return f"OUT/{path.relative_to(folder)}" if path.is_relative_to(folder) else str(value)


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """The keys that differ, with both values."""
    keys = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    return [f"{key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in keys]


def _checked(kind: type[C], told: Mapping[str, Any], where: str) -> C:
    return check_config(kind, told, where)
