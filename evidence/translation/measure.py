"""Measures a policy on held-out sources, and how likely the start policy's own samples still are.

The true services are used directly, whatever the arm was trained with: the control is measured by
the true rewards, too.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.credit import spans_to_token_rewards
from scorekit.files import write_atomic
from trainer.rl.policy import load_policy, pad_token_id
from trainer.rl.rollout import rollout_logprobs
from trainer.runs.run_log import read_jsonl, write_jsonl
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example
from trainer.translation.dumps import completion_line
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward, compute_rewards
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.stats import omission_penalty
from trainer.translation.rollouts import TranslationRollout, generate_rollouts

PROBE_SAMPLES = 2  # of the start policy, for each held-out source
PROBE_SEED = 20_000
MICRO_BATCH_TOKENS = 2048


@dataclass(slots=True)
class Probe:
    """The start policy's samples, and the penalty of each of their tokens (weight 1)."""

    rollouts: list[TranslationRollout]
    penalties: list[list[float]]

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Return (source, translation) of each sample."""
        return [(rollout.src_text, rollout.completion_text) for rollout in self.rollouts]

    def save(self, path: Path) -> None:
        """Write JSON lines."""
        lines = zip(self.rollouts, self.penalties, strict=True)
        write_jsonl(path, [{"rollout": asdict(r), "penalties": p} for r, p in lines])

    @classmethod
    def load(cls, path: Path) -> Probe | None:
        """Read what `save` wrote; None if nothing did."""
        lines = read_jsonl(path)
        if not lines:
            return None
        rollouts = [TranslationRollout(**line["rollout"]) for line in lines]
        return cls(rollouts, [line["penalties"] for line in lines])


class Measure:
    """Measures policies on held-out sources with the true services."""

    def __init__(self, cfg: TranslationConfig, examples: list[Example]) -> None:
        """Prepare to measure with the true services.

        cfg: both services have a weight of 1. Its policy is the start policy.
        """
        torch.set_num_threads(1)
        self.cfg, self.examples = cfg, examples
        self.device = torch.device("cpu")
        self.rewarder = RewardClient(cfg.reward)

    def load(self, folder: Path | str) -> tuple[nn.Module, Any]:
        """Return (model, tokenizer) of a checkpoint."""
        policy = self.cfg.policy.model_copy(update={"path": str(folder)})
        return load_policy(policy, self.device)

    def make_probe(self) -> Probe:
        """Sample the start policy as training does, and have the samples' errors marked."""
        model, tokenizer = self.load(str(self.cfg.policy.path))
        sampling = self.cfg.generation.model_copy(update={"num_samples_per_prompt": PROBE_SAMPLES})
        rollouts = generate_rollouts(self.examples, model, tokenizer, sampling, seed=PROBE_SEED)
        scores = self.rewarder.score([rollout.scored_text for rollout in rollouts])
        rewards = compute_rewards(rollouts, scores, self.cfg.reward)
        scored = [(r, s) for r, s in zip(rollouts, rewards, strict=True) if s.r_seq is not None]
        penalties = [_penalties(r, s, self.cfg.reward) for r, s in scored]
        return Probe([r for r, _ in scored], penalties)

    def sources(self, model: nn.Module, tokenizer: Any) -> list[dict[str, Any]]:
        """Return greedy translations of the held-out sources in order, with their scores.

        The lines are those of an evaluation's dump (trainer/translation/dumps.py), with `penalty`,
        the mean over the tokens of the span penalties at weight 1 (None without spans), and
        `omission`, the sum of the omissions' weights (None if they are not reported).
        """
        rollouts = generate_rollouts(
            self.examples, model, tokenizer, self.cfg.eval_generation(), with_logprobs=False
        )
        scores = self.rewarder.score([rollout.scored_text for rollout in rollouts])
        rewards = compute_rewards(rollouts, scores, self.cfg.reward)
        return [
            {
                **completion_line(rollout, reward),
                "ref": example.ref_text,
                "penalty": _mean_penalty(rollout, reward, self.cfg.reward),
                "omission": _omission(reward, self.cfg.reward),
            }
            for example, rollout, reward in zip(self.examples, rollouts, rewards, strict=True)
        ]

    def probe(self, model: nn.Module, tokenizer: Any, probe: Probe) -> list[dict[str, float]]:
        """Return sums over the penalized and the other tokens, for each sample of the probe.

        The keys are `hit_n`, `hit_logp`, `hit_p` and `free_n`, `free_logp`, `free_p`, under the
        policy at the sampling temperature. The end of sentence is in neither group, because no
        span can cover it.
        """
        rows = rollout_logprobs(
            probe.rollouts,
            model,
            self.cfg.generation.temperature,
            pad_token_id(model, tokenizer),
            MICRO_BATCH_TOKENS,
        )
        line_sums = []
        for rollout, penalties, row in zip(probe.rollouts, probe.penalties, rows, strict=True):
            sums = dict.fromkeys(
                (f"{k}_{v}" for k in ("hit", "free") for v in ("n", "logp", "p")), 0.0
            )
            for (start, end), penalty, logp in zip(
                rollout.token_char_offsets, penalties, row, strict=True
            ):
                if start == end:
                    continue
                kind = "hit" if penalty else "free"
                sums[f"{kind}_n"] += 1
                sums[f"{kind}_logp"] += logp
                sums[f"{kind}_p"] += math.exp(logp)
            line_sums.append(sums)
        return line_sums

    def checkpoint(self, folder: Path | str, probe: Probe, out: Path) -> None:
        """Measure the policy in `folder`, and write the results to `out`."""
        model, tokenizer = self.load(folder)
        lines = self.sources(model, tokenizer)
        results = {"sources": lines, "probe": self.probe(model, tokenizer, probe)}
        write_atomic(out, json.dumps(results, ensure_ascii=False))


def _penalties(rollout: TranslationRollout, reward: SampleReward, cfg: RewardConfig) -> list[float]:
    """Return the weighted penalty of each token by xCOMET's spans."""
    penalties = spans_to_token_rewards(
        rollout.completion_text,
        rollout.token_char_offsets,
        answer.error_spans or [] if (answer := reward.answer("xcomet")) else [],
        cfg.severity_weights.model_dump(),
        cfg.overlap_policy,
        overlap_threshold=cfg.overlap_threshold,
        combine=cfg.span_combine,
        use_confidence=cfg.use_confidence,
    )
    return [cfg.w_xcomet_span * penalty for penalty in penalties]


def _mean_penalty(
    rollout: TranslationRollout, reward: SampleReward, cfg: RewardConfig
) -> float | None:
    """Return the mean penalty of a token by xCOMET's spans; None without spans."""
    if reward.error_spans is None:
        return None
    if reward.r_seq is None or "xcomet" not in reward.answers:
        return 0.0
    penalties = _penalties(rollout, reward, cfg)
    return sum(penalties) / len(penalties) if penalties else 0.0


def _omission(reward: SampleReward, cfg: RewardConfig) -> float | None:
    """Return the summed weights of the omissions; None if no service reports them."""
    answer = reward.answer("mqm")
    return None if answer is None else omission_penalty(answer, cfg)
