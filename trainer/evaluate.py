"""How good the policy is: rewards, error spans, lengths, and (only shown) chrF and BLEU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from scorekit.languages import find_language
from trainer.config import GenerationConfig, RewardConfig
from trainer.data import Example
from trainer.figures import Figures, rollout_figures, service_figures
from trainer.rewards import Rewarder, sample_rewards
from trainer.runlog import completion_line
from trainer.sampler import Sampler, generate_rollouts

#: Languages whose words BLEU cannot find by white space and punctuation.
_BY_CHARACTER = frozenset({"zh", "ja", "ko", "th"})
_SEED = 0  # of sampled translations


@dataclass(frozen=True, slots=True)
class Report:
    """Means over a set of examples; None where there is nothing to average.

    metricx_score_mean: lower is better, over the samples that were scored (metricx_coverage; None
    where the service was not asked).
    metricx_truncated_frac, xcomet_truncated_frac: share of the scored samples whose source or
    translation the model could not read whole.
    metricx_reward_mean: metricx_offset - score. xcomet_score_mean: higher is better.
    spans_mean, spans_*_mean: error spans of a segment, by severity.
    completion_length_mean: tokens, EOS included. truncated_frac: cut by max_new_tokens.
    chrf, bleu: sacrebleu, 0..100, over the examples with a reference; never part of a reward.
    bleu_tokenize: `char` for languages without white space (and Korean), else `13a`.
    examples: one line of the completions dump for each example (trainer/runlog.py).
    """

    samples: int
    metricx_score_mean: float | None
    metricx_score_std: float | None
    metricx_reward_mean: float | None
    metricx_reward_std: float | None
    metricx_coverage: float | None
    metricx_truncated_frac: float | None
    xcomet_score_mean: float | None
    xcomet_score_std: float | None
    xcomet_coverage: float | None
    xcomet_truncated_frac: float | None
    spans_mean: float | None
    spans_MINOR_mean: float | None
    spans_MAJOR_mean: float | None
    spans_CRITICAL_mean: float | None
    text_errors: int
    completion_length_mean: float
    truncated_frac: float
    chrf: float | None
    bleu: float | None
    bleu_tokenize: str | None
    seconds: float
    examples: list[dict[str, Any]]

    def figures(self) -> dict[str, Any]:
        """All fields but the examples."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "examples"}


def evaluate_on_dataset(
    examples: Sequence[Example],
    policy_model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    rewarder: Rewarder,
    reward_cfg: RewardConfig,
    sampler: Sampler | None = None,
) -> Report:
    """Translate each example once and score it by every service that can be asked.

    The same policy gives the same translations, also at a temperature above 0: sampling has a seed
    of its own, and the caller's random numbers go on as if nothing had been drawn. The model is in
    eval mode meanwhile.
    sampler: default: this process. Requests carry no reference.
    Raises what `generate_rollouts` and `Rewarder.score` raise.
    """
    started = time.monotonic()
    with _undisturbed(policy_model):
        rollouts = generate_rollouts(
            examples, policy_model, tokenizer, gen_cfg, sampler=sampler, with_logprobs=False
        )
    texts = [(rollout.src_text, rollout.completion_text) for rollout in rollouts]
    scores = rewarder.score(texts, rewarder.available)
    # as a reward of no weight, so that a scorer without spans can be looked at, too
    shown = reward_cfg.model_copy(update={"w_xcomet_span": 0.0})
    rewards = sample_rewards(rollouts, scores, shown)
    lines = []
    for example, rollout, reward in zip(examples, rollouts, rewards, strict=True):
        line = completion_line(rollout, reward)
        line["ref"] = example.ref_text
        line["chrf"] = _sentence_chrf(rollout.completion_text, example.ref_text)
        lines.append(line)
    figures: Figures = {**rollout_figures(rollouts), **service_figures(rewards, reward_cfg)}
    texts_only = [rollout.completion_text for rollout in rollouts]
    quality = reference_figures(examples, texts_only)
    known = {f.name for f in fields(Report)}
    return Report(
        **{name: value for name, value in figures.items() if name in known},  # type: ignore[arg-type]
        **quality,
        seconds=time.monotonic() - started,
        examples=lines,
    )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode and a fixed seed within; the model's mode and the random state as before after."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    was_training = model.training
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def reference_figures(examples: Sequence[Example], translations: Sequence[str]) -> dict[str, Any]:
    """Corpus chrF and BLEU of the translations whose example has a reference."""
    pairs = [
        (translation, example.ref_text)
        for example, translation in zip(examples, translations, strict=True)
        if example.ref_text
    ]
    if not pairs:
        return {"chrf": None, "bleu": None, "bleu_tokenize": None}
    import sacrebleu

    outputs = [translation for translation, _ in pairs]
    references = [[reference for _, reference in pairs]]
    tokenize = _bleu_tokenize(examples)
    return {
        "chrf": sacrebleu.corpus_chrf(outputs, references).score,
        "bleu": sacrebleu.corpus_bleu(outputs, references, tokenize=tokenize).score,
        "bleu_tokenize": tokenize,
    }


def _bleu_tokenize(examples: Sequence[Example]) -> str:
    languages = [find_language(name) for name in {example.tgt_lang for example in examples}]
    by_character = all(lang is not None and lang.madlad in _BY_CHARACTER for lang in languages)
    return "char" if by_character else "13a"


def _sentence_chrf(translation: str, reference: str | None) -> float | None:
    if not reference:
        return None
    import sacrebleu

    return float(sacrebleu.sentence_chrf(translation, [reference]).score)
