"""Measures a policy on rows with references: greedy translations, samples, and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evidence.gain.arms import PPO_CONFIG, Plan
from scorekit.config import load_config
from scorekit.rewards.rules import chrf
from trainer.rl.policy import load_policy
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example, load_examples
from trainer.translation.evaluation.compare import corpus_metrics, reference_stats
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rollouts import TranslationRollout, generate_rollouts

#: Of the samples that are measured; training draws from other streams.
SEED = 20_000


class Measure:
    """Measures policies by the true services, whatever they were trained with."""

    def __init__(self, plan: Plan, urls: dict[str, str], settings: Sequence[str]) -> None:
        """Open the services.

        settings: of every run.
        """
        torch.set_num_threads(1)
        named = [f"reward.{name}_urls={urls[name]}" for name in ("metricx", "xcomet")]
        path = f"policy.path={plan.start / 'policy'}"
        self.cfg = load_config(TranslationConfig, PPO_CONFIG, [*settings, *named, path])
        self.rewarder = RewardClient(self.cfg.reward)
        self.copies, self._end_bias = plan.size.copies, 0.0
        self.sets = {name: load_examples(plan.folder / f"sets/{name}.jsonl") for name in plan.sets}

    def close(self) -> None:
        """Close the services."""
        self.rewarder.close()

    def pool(self, policy: Path) -> list[tuple[str, str]]:
        """Return (source, translation) of samples, of which the control draws at first."""
        examples = [example for rows in self.sets.values() for example in rows]
        rollouts = self._sample(examples, policy, copies=1)
        return [(rollout.src_text, rollout.completion_text) for rollout in rollouts]

    def policy(
        self, folder: Path, temperature: float | None = None, end_bias: float = 0.0
    ) -> dict[str, dict[str, Any]]:
        """Return the stats of a policy on each set by its name.

        temperature: of the samples; None: that of training.
        end_bias: is taken off the logit of the end of a text.
        """
        self._end_bias = end_bias
        try:
            return {n: self._stats(rows, folder, temperature) for n, rows in self.sets.items()}
        finally:
            self._end_bias = 0.0

    def _stats(
        self, examples: Sequence[Example], folder: Path, temperature: float | None
    ) -> dict[str, Any]:
        greedy = self._greedy(examples, folder)
        scores = self.rewarder.score([rollout.scored_text for rollout in greedy])
        rewards = [
            _total(reward.r_seq, reward.token_rewards)
            for reward in compute_rewards(greedy, scores, self.cfg.reward)
        ]
        samples = self._sample(examples, folder, self.copies, temperature)
        return stats_of(examples, greedy, samples, rewards)

    def _greedy(self, examples: Sequence[Example], folder: Path) -> list[TranslationRollout]:
        model, tokenizer = self._load(folder)
        sampling = self.cfg.eval_generation()
        return list(generate_rollouts(examples, model, tokenizer, sampling, with_logprobs=False))

    def _sample(
        self,
        examples: Sequence[Example],
        folder: Path,
        copies: int,
        temperature: float | None = None,
    ) -> list[TranslationRollout]:
        model, tokenizer = self._load(folder)
        changes: dict[str, Any] = {"num_samples_per_prompt": copies}
        changes |= {} if temperature is None else {"temperature": temperature}
        sampling = self.cfg.generation.model_copy(update=changes)
        return list(
            generate_rollouts(examples, model, tokenizer, sampling, seed=SEED, with_logprobs=False)
        )

    def _load(self, folder: Path) -> tuple[Any, Any]:
        policy = self.cfg.policy.model_copy(update={"path": str(folder)})
        model, tokenizer = load_policy(policy, torch.device("cpu"))
        if self._end_bias:
            model.lm_head = EndsLater(model.lm_head, tokenizer.eos_token_id, self._end_bias)
        return model, tokenizer


class EndsLater(torch.nn.Module):  # type: ignore[misc]
    """A layer of logits whose end of a text is less likely."""

    def __init__(self, head: torch.nn.Module, end: int, bias: float) -> None:
        """Wrap a layer. end: id of the end. bias: is taken off its logit."""
        super().__init__()
        self.head, self.end, self.bias = head, end, bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., vocabulary]."""
        logits: torch.Tensor = self.head(hidden).clone()
        logits[..., self.end] -= self.bias
        return logits


def _total(sequence: float | None, tokens: Sequence[float]) -> float | None:
    """Return the sequence reward and the mean token reward together; None without a reward."""
    if sequence is None:
        return None
    return sequence + (math.fsum(tokens) / len(tokens) if tokens else 0.0)


def stats_of(
    examples: Sequence[Example],
    greedy: Sequence[TranslationRollout],
    samples: Sequence[TranslationRollout],
    rewards: Sequence[float | None],
) -> dict[str, Any]:
    """Return the stats of translations.

    samples: as many of each example, in the order of the examples.
    rewards: of the greedy ones.
    The stats: greedy and sampled sentence chrF of each source (`greedy`, `sampled`), chrF and BLEU
    of all greedy translations, BLEU of the samples (the mean of its copies), characters relative to
    the references, the share that the limit of tokens cut, the mean reward and its coverage.
    """
    references = [example.ref_text or "" for example in examples]
    texts = [rollout.completion_text for rollout in greedy]
    copies = len(samples) // len(examples)
    groups = [samples[i : i + copies] for i in range(0, len(samples), copies)]
    pairs = [rollout.pair for rollout in greedy]
    corpus = reference_stats(pairs, texts, references)
    bleu = corpus_metrics(pairs)["bleu"]
    sampled_bleu = [
        bleu.corpus_score([group[i].completion_text for group in groups], [references]).score
        for i in range(copies)
    ]
    scored = [reward for reward in rewards if reward is not None]
    return {
        "sources": len(examples),
        "greedy": [_chrf(text, ref) for text, ref in zip(texts, references, strict=True)],
        "sampled": [
            round(sum(_chrf(r.completion_text, ref) for r in group) / copies, 3)
            for group, ref in zip(groups, references, strict=True)
        ],
        "corpus_chrf": corpus["chrf"],
        "bleu": corpus["bleu"],
        "sampled_bleu": sum(sampled_bleu) / copies,
        "length": sum(map(len, texts)) / sum(map(len, references)),
        "cut": sum(rollout.finish_reason != "eos" for rollout in greedy) / len(greedy),
        "reward": sum(scored) / len(scored) if scored else None,
        "reward_coverage": len(scored) / len(rewards),
    }


def _chrf(text: str, reference: str) -> float:
    """Return sentence chrF, 0 to 100."""
    return round(chrf({"mt": text, "ref": reference}) or 0.0, 3)
