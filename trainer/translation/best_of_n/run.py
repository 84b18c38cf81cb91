"""Best-of-n SFT: sample and score, choose and mix, train, evaluate before and after.

The folder of a run (misc.run_dir) has the output of each stage, and a stage whose output is there
is not done again:

    config.yaml          the resolved config
    candidates/          samples and scores: trainer/translation/best_of_n/candidates.py
    rows.jsonl           the rows of SFT, with ids
    selection.json       how many sources and pairs they are of
    sft/                 the SFT run, with checkpoints of its own
    trained.json         the checkpoint at its end
    before/              the evaluation of the policy that it started from
    evaluation.*, comparison.*    that of the trained policy, and both side by side
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scorekit.config import save_config
from scorekit.documents import read_json
from scorekit.errors import UserError
from scorekit.files import remove_folder
from scorekit.locks import hold_locks
from trainer.runs.config import check_config, set_key
from trainer.runs.evaluation.files import EvaluationFiles, EvaluationOutcome, policy_at
from trainer.runs.run_log import open_run_dir, write_json, write_jsonl
from trainer.runs.trl.processes import check_alone
from trainer.translation.best_of_n.candidates import CandidateFolder, open_candidates
from trainer.translation.best_of_n.config import BestOfNConfig
from trainer.translation.best_of_n.selection import Row, choose, mix, pair_rows
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example, in_both, load_examples
from trainer.translation.evaluation.compare import compare_policies
from trainer.translation.evaluation.report import write_comparison
from trainer.translation.evaluation.run import earlier_evaluations, run_evaluation

log = logging.getLogger(__name__)
#: The output of the stages, the last one first: a run that is replaced loses them in this order.
_FILES = ("before", "trained.json", "sft", "rows.jsonl", "selection.json", "candidates")
_ADVICE = "Choose another misc.run_dir, or set misc.overwrite to true to start again"


@dataclass(frozen=True, slots=True)
class BestOfNResult:
    """The result of a run.

    selection: the contents of selection.json.
    checkpoint: the trained policy; None: training has no checkpoint yet.
    outcomes: before and after, for each held-out set.
    stopped: why the run ended early; None: it did not.
    """

    selection: Mapping[str, Any]
    checkpoint: Path | None
    outcomes: list[EvaluationOutcome] = field(default_factory=list)
    stopped: str | None = None
    exit_code: int = 0


def run_best_of_n(
    cfg: BestOfNConfig,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    *,
    resume: bool = False,
) -> BestOfNResult:
    """Run all stages that have no output yet.

    train: the sources to sample translations of.
    sets: held-out examples by name.
    resume: go on with the run of misc.run_dir.
    Raises UserError for whatever the user can fix.
    """
    check_alone("best-of-n SFT")
    folder = Path(cfg.misc.run_dir)
    for key, examples in sets.items():
        if note := in_both(set_key(key), train, examples):
            log.warning("%s", note)
    check_start(cfg, resume=resume)
    open_run_dir(cfg.misc)
    with hold_locks([(folder / "best_of_n.lock", False)], "train in the same folder"):
        if not resume:
            for name in _FILES:
                _remove(folder / name)
        save_config(cfg, folder / "config.yaml")
        return _run_stages(cfg, train, sets)


def _run_stages(
    cfg: BestOfNConfig, train: Sequence[Example], sets: Mapping[str, Sequence[Example]]
) -> BestOfNResult:
    """Run the stages that have no output yet."""
    folder = Path(cfg.misc.run_dir)
    rows, selected, trained = (folder / n for n in ("rows.jsonl", "selection.json", "trained.json"))
    if not rows.is_file():
        chosen_rows, counts = make_rows(cfg, train, folder / "candidates")
        write_json(selected, counts)
        write_jsonl(rows, chosen_rows)
    counts = read_json(selected)
    if not trained.is_file():
        from trainer.sft.run import run_sft

        has_begun = (folder / "sft/config.yaml").is_file()
        artifacts = run_sft(cfg.sft_run(str(rows)), resume=has_begun)
        gc.collect()
        if artifacts.stopped or artifacts.checkpoint is None:
            code = artifacts.exit_code
            return BestOfNResult(counts, artifacts.checkpoint, [], artifacts.stopped, code)
        write_json(trained, {"checkpoint": artifacts.checkpoint.name})
    checkpoint = folder / "sft/checkpoints" / str(read_json(trained)["checkpoint"])
    outcomes = _evaluate(cfg.translation, checkpoint, sets) if sets else []
    return BestOfNResult(counts, checkpoint, outcomes)


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def check_start(cfg: BestOfNConfig, *, resume: bool) -> None:
    """Raise UserError if the run cannot start in its folder, or not be resumed there."""
    folder = Path(cfg.misc.run_dir)
    config = folder / "config.yaml"
    recorded = _read_config(config)
    if resume:
        if recorded is None:
            raise UserError(f"--resume: {folder} has no run of best-of-n SFT")
        check_config(cfg, recorded)
        return
    existing = [name for name in (*_FILES, "config.yaml") if (folder / name).exists()]
    if not existing:
        return
    if recorded is None:
        raise UserError(
            f"misc.run_dir: {folder} has {', '.join(existing)}, which are of no best-of-n run. "
            "Choose another folder"
        )
    if not cfg.misc.overwrite:
        raise UserError(
            f"misc.run_dir: {folder} has a run. Go on with it (--resume), choose another folder, "
            "or set misc.overwrite to true to replace it"
        )


def _read_config(config: Path) -> dict[str, Any] | None:
    """Return the recorded config of a run; None if there is none of this task."""
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    is_ours = isinstance(values, dict) and values.get("task") == "best_of_n"
    return values if is_ours else None


def make_rows(
    cfg: BestOfNConfig, train: Sequence[Example], folder: Path
) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows to train on, and what they are of. Raises UserError without any."""
    pairs = load_pairs(cfg)
    counts: dict[str, Any] = {"by": cfg.choice.by}
    chosen: list[Row] = []
    with open_candidates(cfg.translation, "data.train", None, train) as opened:
        model, tokenizer = opened.learner.model, opened.learner.tokenizer
        rows_of_pairs = pair_rows(pairs, model, tokenizer, cfg.generation) if pairs else []
        if cfg.pairs.share < 1 or not pairs:
            sources = CandidateFolder(folder, opened, greedy=False, advice=_ADVICE).collect()
            selected = choose(sources, cfg.choice.by, cfg.misc.seed)
            chosen, counts = selected.rows, counts | selected.counts
            if not chosen:
                raise UserError(f"no source has a translation to train on: {counts['left_out']}")
    rows = mix(chosen, rows_of_pairs, cfg.pairs.share, cfg.misc.seed) if pairs else chosen
    gc.collect()  # of the policy: SFT loads its own
    return rows, counts | {"pairs": len(rows) - len(chosen), "rows": len(rows)}


def load_pairs(cfg: BestOfNConfig) -> list[Example]:
    """Return the examples of pairs.path; [] without a path. Raises UserError."""
    pairs, data = cfg.pairs, cfg.data
    if pairs.path is None:
        return []
    return load_examples(
        pairs.path,
        split=pairs.split,
        columns=data.columns,
        src_lang=data.src_lang,
        tgt_lang=data.tgt_lang,
        bad_rows=data.bad_rows,
    )


def _evaluate(
    cfg: TranslationConfig, checkpoint: Path, sets: Mapping[str, Sequence[Example]]
) -> list[EvaluationOutcome]:
    """Evaluate the policy before training and the trained one, unless that is done already."""
    folder, before = Path(cfg.misc.run_dir), Path(cfg.misc.run_dir) / "before"
    policy = policy_at(cfg.policy, str(checkpoint))
    if not _is_evaluated(before, str(cfg.policy.path), sets):
        misc = cfg.misc.model_copy(update={"run_dir": str(before)})
        run_evaluation(cfg.model_copy(update={"misc": misc}), sets, overwrite=True)
    if not _is_evaluated(folder, str(policy.path), sets):
        after = cfg.model_copy(update={"policy": policy})
        return run_evaluation(after, sets, str(before), overwrite=True)
    earlier, now = (earlier_evaluations(str(path), sets) for path in (before, folder))
    return [
        EvaluationFiles(folder, name).outcome(
            now[name],
            earlier[name],
            compare_policies,
            {"set": name, "sources": len(examples)},
            write_comparison,
        )
        for name, examples in sets.items()
    ]


def _is_evaluated(folder: Path, policy: str, sets: Iterable[str]) -> bool:
    """Return whether the folder has this policy's evaluation of every set."""
    paths = [EvaluationFiles(folder, name).path("json") for name in sets]
    return all(path.is_file() and read_json(path).get("policy") == policy for path in paths)
