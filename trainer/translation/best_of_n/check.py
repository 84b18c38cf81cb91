"""`scorekit check` of best-of-n SFT: check a run before weights are loaded."""

from __future__ import annotations

from pathlib import Path

from scorekit.errors import UserError
from scorekit.report.findings import Findings
from trainer.runs.run_log import open_run_dir
from trainer.runs.trl.processes import check_alone
from trainer.translation.best_of_n.config import BestOfNConfig
from trainer.translation.best_of_n.run import check_start, load_pairs
from trainer.translation.check import check_inputs, check_reward


def check_run(cfg: BestOfNConfig, processes: int = 1) -> Findings:
    """Check everything that a run of this config needs, without loading weights."""
    findings = Findings()
    findings.run_check("config", check_reward, cfg.translation)
    findings.run_check("processes", _alone, processes)
    check_inputs(cfg.translation, findings)
    if cfg.pairs.path is not None:
        findings.run_check("pairs.path", _pairs, cfg)
    findings.run_check("sft", _sft, cfg)
    findings.run_check("misc.run_dir", _run_dir, cfg)
    return findings


def _alone(processes: int) -> tuple[None, str]:
    check_alone("best-of-n SFT", processes)
    return None, "1"


def _pairs(cfg: BestOfNConfig) -> tuple[None, str]:
    pairs = load_pairs(cfg)
    without = sum(not pair.ref_text for pair in pairs)
    if without:
        raise UserError(f"pairs.path: {without} of {len(pairs)} rows have no ref_text")
    return None, f"{len(pairs)} pairs, {cfg.pairs.share:g} of the rows"


def _sft(cfg: BestOfNConfig) -> tuple[None, str]:
    import torch

    from trainer.sft.trainer import sft_arguments

    sft_arguments(cfg.sft_run("rows.jsonl"), torch.device("cpu"))
    updates = cfg.sft.max_steps
    return None, f"{updates} updates" if updates else f"{cfg.sft.num_train_epochs:g} passes"


def _run_dir(cfg: BestOfNConfig) -> tuple[None, str]:
    folder = Path(cfg.misc.run_dir)
    if folder.is_file():
        raise UserError(f"misc.run_dir: {folder} is a file")
    if (folder / "config.yaml").is_file() and not cfg.misc.overwrite:
        check_start(cfg, resume=True)
        return None, f"{folder}: has a run. Go on with it with --resume"
    check_start(cfg, resume=False)
    open_run_dir(cfg.misc)
    return None, f"{folder}: can be written to"
