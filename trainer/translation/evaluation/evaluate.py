"""How good the policy is: rewards, error spans, lengths, and (only shown) chrF and BLEU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.schemas import Scored
from trainer.rl.sampler import Sampler
from trainer.rl.world import World
from trainer.runs.config import THE_SET
from trainer.runs.runlog import read_jsonl
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example
from trainer.translation.dumps import completion_line
from trainer.translation.evaluation.figures import (
    earned,
    guard_figures,
    mean_of,
    rollout_figures,
    service_figures,
)
from trainer.translation.evaluation.quality import reference_figures, sentence_chrf
from trainer.translation.prompting import Prompt
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.formula import SampleReward, sample_rewards
from trainer.translation.rewards.score_batch import Scores
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rollouts import TranslationRollout, generate_rollouts

_SEED = 0  # of sampled translations
#: Share of the examples that could have a reward which a mean has to cover to be held against the
#: means of other evaluations.
_RATED_FROM = 0.95


@dataclass(frozen=True, slots=True)
class Report:
    """Means over a set of examples; None where there is nothing to average.

    metricx_score_mean: lower is better, over the samples that were scored (metricx_coverage; None
    where the service was not asked).
    metricx_truncated_frac, xcomet_truncated_frac: share of the scored samples whose source or
    translation the model could not read whole.
    metricx_reward_mean: metricx_offset - score. xcomet_score_mean: higher is better.
    spans_mean, spans_*_mean: error spans of a segment, by severity.
    reward_mean: sequence reward and mean token reward together, over the samples that have them
    (reward_coverage).
    completion_length_mean: tokens, EOS included. truncated_frac: cut by max_new_tokens.
    chrf, bleu: sacrebleu, 0..100, over the examples with a reference; never part of a reward. BLEU
    stands only where all examples are of one language pair (quality.py says why).
    bleu_tokenize: `char` for languages without white space (and Korean), else `13a`.
    guards: guard -> mean fault that it found, of those that were asked (rewards/guards.py).
    pairs: where there are several language pairs, the figures of each; else empty.
    examples: one line of the completions dump for each example (trainer/translation/dumps.py).
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
    spans_UNKNOWN_mean: float | None
    text_errors: int
    source_errors: int
    reward_mean: float | None
    reward_coverage: float
    completion_length_mean: float
    truncated_frac: float
    chrf: float | None
    bleu: float | None
    bleu_tokenize: str | None
    guards: dict[str, float]
    pairs: dict[str, dict[str, Any]]
    seconds: float
    examples: list[dict[str, Any]]

    @property
    def rating(self) -> float | None:
        """reward_mean, by which the best checkpoint is chosen; None where too many examples have no
        reward: what a service left out may have been the hard ones."""
        could = self.samples - (self.source_errors or 0)  # None of a run of an earlier release
        covered = round(self.reward_coverage * self.samples)
        return self.reward_mean if covered >= _RATED_FROM * could else None

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
    world: World | None = None,
    prompts: Sequence[Prompt] | None = None,
) -> Report:
    """Translate each example once and score it by every service that can be asked.

    The same policy gives the same translations, also at a temperature above 0: sampling has a seed
    of its own, and the caller's random numbers go on as if nothing had been drawn. The model is in
    eval mode meanwhile.
    sampler: default: this process. Requests carry no reference.
    world: the processes that share the examples, each of which gets the whole report. Where they
    share the weights instead, each translates everything, since all have to go side by side.
    prompts: of these examples, where they have been made.
    Raises what `generate_rollouts` and `Rewarder.score` raise.
    """
    started = time.monotonic()
    sharing = None if world is None or world.is_sharded else world
    mine = sharing.share(examples) if sharing else list(enumerate(examples))
    with _undisturbed(policy_model):
        rollouts = generate_rollouts(
            [example for _, example in mine],
            policy_model,
            tokenizer,
            gen_cfg,
            prompts=None if prompts is None else [prompts[place] for place, _ in mine],
            sampler=sampler,
            with_logprobs=False,
        )
    texts = [(rollout.src_text, rollout.completion_text) for rollout in rollouts]
    scores = rewarder.score(texts, rewarder.available)
    if not _gives_spans(scores):  # such a scorer can be looked at, too
        reward_cfg = reward_cfg.model_copy(update={"w_xcomet_span": 0.0})
    rewards = sample_rewards(rollouts, scores, reward_cfg)
    if sharing:
        places = [place for place, _ in mine]
        found = list(zip(places, rollouts, rewards, strict=True))
        whole = sorted(sharing.gather(found), key=lambda entry: entry[0])
        rollouts, rewards = [entry[1] for entry in whole], [entry[2] for entry in whole]
    return Report(
        **_figures(examples, rollouts, rewards, reward_cfg),
        pairs=_by_pair(examples, rollouts, rewards, reward_cfg),
        seconds=time.monotonic() - started,
        examples=[_line(*of) for of in zip(examples, rollouts, rewards, strict=True)],
    )


def _by_pair(
    examples: Sequence[Example],
    rollouts: Sequence[TranslationRollout],
    rewards: Sequence[SampleReward],
    cfg: RewardConfig,
) -> dict[str, dict[str, Any]]:
    """The figures of each language pair; none where there is but one."""
    pairs = list(dict.fromkeys(rollout.pair for rollout in rollouts))
    found = {}
    for pair in pairs if len(pairs) > 1 else ():
        chosen = [i for i, rollout in enumerate(rollouts) if rollout.pair == pair]
        found[pair] = _figures(
            [examples[i] for i in chosen],
            [rollouts[i] for i in chosen],
            [rewards[i] for i in chosen],
            cfg,
        )
    return found


def _line(example: Example, rollout: TranslationRollout, reward: SampleReward) -> dict[str, Any]:
    """Of the completions dump."""
    chrf = sentence_chrf(rollout.completion_text, example.ref_text)
    return completion_line(rollout, reward) | {"ref": example.ref_text, "chrf": chrf}


def _gives_spans(scores: Scores) -> bool:
    results = scores.results.get("xcomet", [])
    scored = [result for result in results if isinstance(result, Scored)]
    return bool(results) and all(result.error_spans is not None for result in scored)


def _figures(
    examples: Sequence[Example],
    rollouts: Sequence[TranslationRollout],
    rewards: Sequence[SampleReward],
    cfg: RewardConfig,
) -> dict[str, Any]:
    """The fields of `Report` that are figures of these examples."""
    rewarded = earned(rewards)
    figures = {**rollout_figures(rollouts), **service_figures(rewards, cfg)}
    figures |= {
        "reward_mean": mean_of(rewarded),
        "reward_coverage": len(rewarded) / max(1, len(rewards)),
    }
    known = {f.name for f in fields(Report)}
    figures = {name: value for name, value in figures.items() if name in known}
    faults = {
        key.removeprefix("guard_").removesuffix("_mean"): fault
        for key, fault in guard_figures(rewards).items()
        if fault is not None
    }
    return {**figures, "guards": faults} | reference_figures(
        [rollout.pair for rollout in rollouts],
        [rollout.completion_text for rollout in rollouts],
        [example.ref_text for example in examples],
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


def read_reports(folder: Path) -> dict[str, list[tuple[int, Report]]]:
    """(update, report) of the evaluations in eval.jsonl of a run's folder, by the names of their
    sets."""
    sets: dict[str, list[tuple[int, Report]]] = {}
    for line in read_jsonl(folder / "eval.jsonl"):
        values = {f.name: line.get(f.name) for f in fields(Report)}
        values["examples"] = read_jsonl(folder / line["completions"])
        reports = sets.setdefault(line.get("set", THE_SET), [])
        reports.append((line["update"], Report(**values)))  # type: ignore[arg-type]
    return sets
