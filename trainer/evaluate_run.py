"""`python -m trainer evaluate`: a policy's evaluation as files, alone or beside another policy's.

misc.run_dir gets evaluation.json (figures), evaluation.jsonl (a line for each translation) and
evaluation.html; against another policy, also comparison.json and comparison.html, and the other's
evaluation in `against/`. Greedy by default; the `eval` section of the config says otherwise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from scorekit.errors import UserError
from trainer.compare import RESAMPLES, SEED, PairedFigure, compare_policies
from trainer.config import PolicyConfig, TrainerConfig
from trainer.data import Example
from trainer.evaluate import evaluate_on_dataset
from trainer.figures import severity_counts
from trainer.policy import autocast, check_whole, load_policy, prepare_torch
from trainer.report import write_comparison, write_evaluation
from trainer.runlog import open_run_dir, read_jsonl, write_jsonl, write_text
from trainer.services import Rewarder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """policy: its path. figures: those of `Report`, and `scored_by`: the model behind each
    service. lines: of its dump."""

    policy: str
    figures: Mapping[str, Any]
    lines: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """groups: what `compare_policies` gives for `first` (the other policy) and `second`."""

    first: Evaluation
    second: Evaluation
    groups: Mapping[str, Sequence[PairedFigure]]


def run_evaluation(
    cfg: TrainerConfig, examples: Sequence[Example], against: str | None = None
) -> tuple[Evaluation, SideBySide | None]:
    """Evaluate the policy, and compare it with `against`: another policy's folder or hub id, or
    the folder of an earlier evaluation, whose translations and scores are taken as they are.

    Raises UserError on what the user can mend, before weights load where that can be known.
    """
    folder = open_run_dir(cfg)
    earlier = None if against is None else _earlier(against, examples)
    with closing(Rewarder(cfg.reward, caching=cfg.misc.caching)) as rewarder:
        if earlier is not None:
            _check_scorers(earlier, _scorers(rewarder))
        evaluation = _evaluate(cfg, cfg.policy, examples, rewarder, folder)
        if against is None:
            return evaluation, None
        if earlier is None:
            other = cfg.policy.model_copy(
                update={"path": against, "tokenizer": None, "revision": None}
            )
            earlier = _evaluate(cfg, other, examples, rewarder, folder / "against")
    groups = compare_policies(earlier.lines, evaluation.lines)
    compared = SideBySide(earlier, evaluation, groups)
    _write_comparison(folder, compared)
    return evaluation, compared


def _evaluate(
    cfg: TrainerConfig,
    policy: PolicyConfig,
    examples: Sequence[Example],
    rewarder: Rewarder,
    folder: Path,
) -> Evaluation:
    """Load, translate, score, write."""
    device = prepare_torch(cfg.misc)
    model, tokenizer = load_policy(policy, device)
    generation = cfg.eval_generation()
    with autocast(device, cfg.misc.dtype):
        report = evaluate_on_dataset(examples, model, tokenizer, generation, rewarder, cfg.reward)
    figures = {
        "policy": policy.path,
        "scored_by": _scorers(rewarder),
        **report.figures(),
        "severities": [row._asdict() for row in severity_counts(report.examples)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "evaluation.jsonl", report.examples)
    _write_json(folder / "evaluation.json", figures)
    resolved = cfg.model_copy(update={"policy": policy}).model_dump(mode="json")
    text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    write_evaluation(folder, str(policy.path), figures, report.examples, text)
    return Evaluation(str(policy.path), figures, report.examples)


def _earlier(against: str, examples: Sequence[Example]) -> Evaluation | None:
    """The evaluation that stands in a folder; None where `against` names a policy."""
    folder = Path(against)
    if not (folder / "evaluation.jsonl").is_file():
        check_whole(against, "--against")
        is_path = folder.exists() or against.startswith((".", "/", "~"))
        if is_path and not (folder / "config.json").is_file():
            raise UserError(
                f"--against: {against} has neither evaluation.jsonl (of an earlier evaluation) nor "
                "config.json (of a policy)"
            )
        return None
    lines = read_jsonl(folder / "evaluation.jsonl")
    wanted = [(f"{e.src_lang_code}>{e.tgt_lang_code}", e.src_text) for e in examples]
    if [(line.get("pair"), line["src"]) for line in lines] != wanted:
        raise UserError(
            f"--against: {against} translated {len(lines)} sources that are not these "
            f"{len(examples)} in this order: evaluate it with the same data.eval and eval_limit"
        )
    figures = {}
    if (folder / "evaluation.json").is_file():
        figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    return Evaluation(str(figures.get("policy", against)), figures, lines)


def _scorers(rewarder: Rewarder) -> dict[str, str]:
    return {info.service: info.model for info in rewarder.infos.values()}


def _check_scorers(earlier: Evaluation, now: Mapping[str, str]) -> None:
    """Raise UserError where another model scored: its scores cannot be held against these."""
    for service, model in (earlier.figures.get("scored_by") or {}).items():
        if now.get(service, model) != model:
            raise UserError(
                f"--against: scored by the {service} model {model!r}, the service here runs "
                f"{now[service]!r}: scores of two models cannot be compared; evaluate it again"
            )


def _write_comparison(folder: Path, compared: SideBySide) -> None:
    names = (compared.first.policy, compared.second.policy)
    groups = {
        name: [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
        for name, figures in compared.groups.items()
    }
    values = {"first": names[0], "second": names[1], "sources": len(compared.first.lines),
              "resamples": RESAMPLES, "seed": SEED, "groups": groups}  # fmt: skip
    _write_json(folder / "comparison.json", values)
    write_comparison(folder, names, compared.groups, compared.first.lines, compared.second.lines)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False))
