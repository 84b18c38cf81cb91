"""How good the policy is: rewards, error spans, lengths, and (only shown) chrF and BLEU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from scorekit.numeric.thresholds import below
from trainer.rl.sampler import Sampler, undisturbed
from trainer.rl.world import World
from trainer.runs.config import THE_SET
from trainer.runs.figures import mean_of
from trainer.runs.rollout_figures import rollout_figures
from trainer.runs.runlog import Dumped
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example
from trainer.translation.dumps import completion_line
from trainer.translation.evaluation.figures import (
    earned,
    read_evaluations,
    term_figures,
)
from trainer.translation.evaluation.held_out import (
    HeldOutMetrics,
    Scores,
    line_metrics,
    metric_figures,
    whole_scores,
)
from trainer.translation.evaluation.quality import reference_figures, sentence_chrf
from trainer.translation.prompting import Prompt
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.formula import sample_rewards
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rewards.terms.xcomet_spans import without_spans
from trainer.translation.rollouts import TranslationRollout, generate_rollouts

_SEED = 0  # of sampled translations
#: Share of the examples that could have a reward which a mean has to cover to be held against the
#: means of other evaluations.
_RATED_FROM = 0.95
#: Figures that a report has as fields; those of the rollouts that it has at all.
_OWN = ("samples", "reward_mean", "reward_coverage", "source_errors")
_SHOWN = ("samples", "completion_length_mean", "truncated_frac")


@dataclass(slots=True)
class Report:
    """Means over a set of examples; None where there is nothing to average.

    reward_mean: sequence reward and mean token reward together, over the samples that have them
    (reward_coverage). source_errors: samples that could have none.
    values: the other figures (evaluation/figures.py), by their keys, which `report[key]` gives too:
    those of the reward's terms, completion_length_mean (tokens, EOS included), truncated_frac (cut
    by max_new_tokens), chrf and bleu (sacrebleu, 0..100, over the examples with a reference; never
    part of a reward; BLEU stands only where all examples are of one language pair: quality.py says
    why), bleu_tokenize (`char` for languages without white space, and Korean, else `13a`).
    pairs: where there are several language pairs, the figures of each; else empty.
    examples: one line of the completions dump for each example (trainer/translation/dumps.py).
    """

    samples: int
    reward_mean: float | None
    reward_coverage: float
    source_errors: int
    values: dict[str, Any]
    pairs: dict[str, dict[str, Any]]
    seconds: float
    examples: Sequence[dict[str, Any]]

    def __getitem__(self, key: str) -> Any:
        return self.figures()[key]

    @property
    def rating(self) -> float | None:
        """reward_mean, by which the best checkpoint is chosen; None where too many examples have no
        reward: what a service left out may have been the hard ones."""
        could = self.samples - self.source_errors
        covered = round(self.reward_coverage * self.samples)
        return None if below(covered, _RATED_FROM * could) else self.reward_mean

    def figures(self) -> dict[str, Any]:
        """All of them by their keys, `values` among the others; not the examples."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        del own["examples"]
        return own.pop("values") | own


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
    metrics: HeldOutMetrics | None = None,
) -> Report:
    """Translate each example once and score it by every service that can be asked.

    The same policy gives the same translations, also at a temperature above 0: sampling has a seed
    of its own, and the caller's random numbers go on as if nothing had been drawn. The model is in
    eval mode meanwhile.
    sampler: default: this process. Only `metrics` are sent references.
    world: the processes that share the examples, each of which gets the whole report. Where they
    share the weights instead, each translates everything, since all have to go side by side.
    prompts: of these examples, where they have been made. metrics: shown, and no reward's.
    Raises what `generate_rollouts` and `Rewarder.score` raise.
    """
    started = time.monotonic()
    sharing = None if world is None or world.is_sharded else world
    mine = sharing.share(examples) if sharing else list(enumerate(examples))
    with undisturbed(policy_model, _SEED):
        rollouts = generate_rollouts(
            [example for _, example in mine],
            policy_model,
            tokenizer,
            gen_cfg,
            prompts=None if prompts is None else [prompts[place] for place, _ in mine],
            sampler=sampler,
            with_logprobs=False,
        )
    texts = [rollout.scored_text for rollout in rollouts]
    scores = rewarder.score(texts, rewarder.available)
    reward_cfg = without_spans(scores, reward_cfg)
    rewards = sample_rewards(rollouts, scores, reward_cfg)
    held_out = _held_out(metrics, mine, rollouts)
    if sharing:
        places = [place for place, _ in mine]
        held_out = whole_scores(held_out, places, sharing.gather)
        found = list(zip(places, rollouts, rewards, strict=True))
        whole = sorted(sharing.gather(found), key=lambda entry: entry[0])
        rollouts, rewards = [entry[1] for entry in whole], [entry[2] for entry in whole]
    values = _figures(examples, rollouts, rewards, reward_cfg)
    values |= metric_figures(held_out, range(len(examples)))
    own = {key: values.pop(key) for key in _OWN}
    return Report(
        **own,
        values=values,
        pairs=_by_pair(examples, rollouts, rewards, reward_cfg, held_out),
        seconds=time.monotonic() - started,
        examples=[
            _line(*of) | line_metrics(held_out, k)
            for k, of in enumerate(zip(examples, rollouts, rewards, strict=True))
        ],
    )


def _held_out(
    metrics: HeldOutMetrics | None,
    mine: Sequence[tuple[int, Example]],
    rollouts: Sequence[TranslationRollout],
) -> Scores:
    """What the metrics that are no reward say of these translations."""
    if metrics is None:
        return {}
    pairs = zip(mine, rollouts, strict=True)
    return metrics.score([(of.src_text, of.completion_text, e.ref_text) for (_, e), of in pairs])


def _by_pair(
    examples: Sequence[Example],
    rollouts: Sequence[TranslationRollout],
    rewards: Sequence[SampleReward],
    cfg: RewardConfig,
    held_out: Scores,
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
        ) | metric_figures(held_out, chosen)
    return found


def _line(example: Example, rollout: TranslationRollout, reward: SampleReward) -> dict[str, Any]:
    """Of the completions dump."""
    chrf = sentence_chrf(rollout.completion_text, example.ref_text)
    return completion_line(rollout, reward) | {"ref": example.ref_text, "chrf": chrf}


def _figures(
    examples: Sequence[Example],
    rollouts: Sequence[TranslationRollout],
    rewards: Sequence[SampleReward],
    cfg: RewardConfig,
) -> dict[str, Any]:
    """Those of these examples, by their keys."""
    rewarded = earned(rewards)
    return {
        **{key: value for key, value in rollout_figures(rollouts).items() if key in _SHOWN},
        **term_figures(rewards, cfg),
        "reward_mean": mean_of(rewarded),
        "reward_coverage": len(rewarded) / max(1, len(rewards)),
        **reference_figures(
            [rollout.pair for rollout in rollouts],
            [rollout.completion_text for rollout in rollouts],
            [example.ref_text for example in examples],
        ),
    }


def read_reports(folder: Path) -> dict[str, list[tuple[int, Report]]]:
    """(update, report) of the evaluations in eval.jsonl of a run's folder, by the names of their
    sets."""
    sets: dict[str, list[tuple[int, Report]]] = {}
    for line in read_evaluations(folder):
        name, update, dump = line.pop("set", THE_SET), line.pop("update"), line.pop("completions")
        line.pop("decides", None)
        line.pop("stopped", None)
        own = {f.name: line.pop(f.name, None) for f in fields(Report)}
        own |= {"values": line, "examples": Dumped(folder / dump)}
        own["source_errors"] = own["source_errors"] or 0  # None of a run of an earlier release
        sets.setdefault(name, []).append((update, Report(**own)))
    return sets
