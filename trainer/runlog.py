"""The folder of a run, and the format of what stands in it.

runs/<name>/
    config.yaml             the resolved config
    log.jsonl               one object for each update
    eval.jsonl              one object for each evaluation
    completions/            train-000001.jsonl, eval-000000.jsonl: one object for each completion
    checkpoints/            step-000020/: see trainer/checkpoint.py
    evaluation.json         the report of `python -m trainer evaluate`

**log.jsonl.** `update` (from 1), `skipped` (true: no sample was scored, nothing was learned),
`lr`, the figures of trainer/figures.py (rollout, reward, advantage), of `TrainStats` (policy_loss,
approx_kl, clip_frac, kl_ref, grad_norm, ...), and seconds: `rollout_s`, `reward_s`, `update_s`.
A figure that does not exist is null. Every mean of scores stands beside its coverage
(scored / asked).

**eval.jsonl.** `update` (0: before training), `seconds`, `completions` (the dump's path within the
folder), and the fields of `trainer.evaluate.Report`.

**completions/eval-*.jsonl.** `id`, `src`, `mt`, `ref` (null without one), `tokens`,
`finish_reason`, `metricx_score`, `xcomet_score`, `chrf` (of the segment; null where there is none),
`error_spans` (list of `start`, `end`, `severity`, `confidence`, `text`; null if not asked),
`error` (why it has no score, else null). The order is that of the examples in every dump of a
run, so that line k before and line k after translate the same source.

**completions/train-*.jsonl.** The same fields without `ref` and `chrf`, and `r_seq`,
`token_char_offsets`, `token_rewards`, `advantages` (null for a sample that was left out).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scorekit.config import save_config
from scorekit.errors import UserError
from trainer.advantage import TokenAdvantages
from trainer.config import TrainerConfig
from trainer.rewards import SampleReward
from trainer.sampler import Rollout

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_OWN = ("config.yaml", "log.jsonl", "eval.jsonl", "completions", "checkpoints")


class RunLog:
    """Writes the folder of a run. Raises UserError where another run stands in it, unless the
    config says to replace it; only what this class writes is replaced."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self.folder = Path(cfg.misc.run_dir)
        check_run_dir(cfg)
        for name in _OWN:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (self.folder / "completions").mkdir(parents=True)
        save_config(cfg, self.folder / "config.yaml")

    def write_update(self, line: dict[str, Any]) -> None:
        """Append to log.jsonl."""
        append_jsonl(self.folder / "log.jsonl", line)

    def write_evaluation(self, line: dict[str, Any], examples: Iterable[dict[str, Any]]) -> None:
        """Append to eval.jsonl and dump its completions."""
        name = f"completions/eval-{line['update']:06d}.jsonl"
        write_jsonl(self.folder / name, examples)
        append_jsonl(self.folder / "eval.jsonl", {**line, "completions": name})

    def write_completions(self, update: int, completions: Iterable[dict[str, Any]]) -> None:
        """Dump the training completions of an update."""
        write_jsonl(self.folder / f"completions/train-{update:06d}.jsonl", completions)


def check_run_dir(cfg: TrainerConfig) -> None:
    """Raise UserError if a run stands in run_dir that the config does not want replaced."""
    if (Path(cfg.misc.run_dir) / "log.jsonl").exists() and not cfg.misc.overwrite:
        raise UserError(
            f"misc.run_dir: {cfg.misc.run_dir} holds a run; choose another folder, or set "
            "misc.overwrite to true to replace it"
        )


def append_jsonl(path: Path, line: dict[str, Any]) -> None:
    """One line more, so that a run that dies leaves what it knew."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_json(line) + "\n")


def write_jsonl(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """A whole file."""
    path.write_text("".join(_json(line) + "\n" for line in lines), encoding="utf-8")


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
        "src": rollout.src_text,
        "mt": rollout.completion_text,
        "tokens": len(rollout.completion_token_ids),
        "finish_reason": rollout.finish_reason,
        "metricx_score": reward.metricx_score,
        "xcomet_score": reward.xcomet_score,
        "error_spans": None if spans is None else [span.model_dump() for span in spans],
        "error": reward.text_error or reward.service_error,
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
