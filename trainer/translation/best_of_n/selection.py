"""Choose one translation of each source, and mix the chosen with pairs, as rows for SFT."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from scorekit.errors import UserError
from scorekit.seeds import stream_seed
from trainer.translation.best_of_n.candidates import Candidate, SampledSource
from trainer.translation.best_of_n.replies import ReplyEnd
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example
from trainer.translation.prompting import fitting_prompts

log = logging.getLogger(__name__)
#: A row of SFT, with ids (trainer/sft/rows.py).
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The translations that are trained on.

    rows: one for each source that has a choice.
    left_out: reason -> number of sources without one.
    reward, mean_reward: means over these sources, of the chosen and of all their samples.
    """

    rows: list[Row]
    left_out: Counter[str]
    reward: float | None
    mean_reward: float | None

    @property
    def counts(self) -> dict[str, Any]:
        """Return the numbers for the run's files and the console."""
        return {
            "chosen": len(self.rows),
            "left_out": dict(self.left_out),
            "reward_of_chosen": self.reward,
            "reward_of_samples": self.mean_reward,
        }


def choose(
    sources: Sequence[SampledSource], by: Literal["reward", "random"], seed: int
) -> ChosenRows:
    """Return one translation of each source.

    Translations that max_new_tokens has cut, empty ones, and those without a reward are not chosen.
    Of equal rewards the more frequent sample is taken.
    """
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    totals, means = [], []
    for index, source in enumerate(sources):
        sampled = [c for c in source.candidates if c.count]
        complete = [c for c in sampled if c.is_complete and c.text.strip()]
        rated = [c for c in complete if c.reward is not None]
        if not rated:
            reason = "no translation with a reward" if complete else "no complete translation"
            left_out[reason] += 1
            continue
        if by == "reward":
            best = max(rated, key=lambda c: (c.reward or 0.0, c.count))
        else:
            draw = random.Random(stream_seed("choice", seed, index))
            (best,) = draw.choices(rated, [c.count for c in rated])
        totals.append(best.reward or 0.0)
        means.append(_mean_reward(rated))
        rows.append(_row(source.prompt.ids.tolist(), best.ids, "sample", source.example.id))
    return ChosenRows(
        rows,
        left_out,
        sum(totals) / len(totals) if totals else None,
        sum(means) / len(means) if means else None,
    )


def _mean_reward(rated: Sequence[Candidate]) -> float:
    return sum((c.reward or 0.0) * c.count for c in rated) / sum(c.count for c in rated)


def pair_rows(
    examples: Sequence[Example], model: nn.Module, tokenizer: Any, gen_cfg: GenerationConfig
) -> list[Row]:
    """Return the rows of pairs with the prompt of a sample. Raises UserError without references."""
    without = [example for example in examples if not example.ref_text]
    if without:
        raise UserError(
            f"pairs.path: {len(without)} of {len(examples)} rows have no ref_text (first "
            f"{without[0].location or without[0].id}). Remove them, or name its column in "
            "data.columns"
        )
    prompts, message = fitting_prompts(
        "pairs.path", examples, model, tokenizer, gen_cfg, refuse=False
    )
    if message:
        log.warning("%s", message)
    end, longest, rows = ReplyEnd(model, tokenizer), gen_cfg.max_new_tokens, list[Row]()
    for prompt in prompts:
        reply = end.reply_ids(prompt.example.ref_text or "")
        if len(reply) <= longest:  # longer ones the policy could not write
            rows.append(_row(prompt.ids.tolist(), reply, "pair", prompt.example.id))
    if len(rows) < len(prompts):
        log.warning(
            "pairs.path: %d of %d references are longer than generation.max_new_tokens (%d), and "
            "left out",
            len(prompts) - len(rows),
            len(prompts),
            longest,
        )
    if not rows:
        raise UserError("pairs.path: no row is short enough. Raise generation.max_new_tokens")
    return rows


def mix(chosen: Sequence[Row], pairs: Sequence[Row], share: float, seed: int) -> list[Row]:
    """Return the chosen rows with so many pairs that these are `share` of all rows.

    The pairs are drawn at random, each once. If there are too few, all are taken, and a warning
    says which share they are. share 1: all pairs alone.
    """
    if share == 1:
        return list(pairs)
    num_pairs = round(len(chosen) * share / (1 - share))
    if num_pairs > len(pairs):
        log.warning(
            "pairs.share: %g of the rows would be %d pairs, and pairs.path has %d: they are %.2f "
            "of the rows",
            share,
            num_pairs,
            len(pairs),
            len(pairs) / max(1, len(pairs) + len(chosen)),
        )
    draw = random.Random(stream_seed("pairs", seed))
    return [*chosen, *draw.sample(list(pairs), min(num_pairs, len(pairs)))]


def _row(prompt: list[int], reply: list[int], kind: str, id: str) -> Row:
    mask = [0] * len(prompt) + [1] * len(reply)
    return {"kind": kind, "id": id, "input_ids": prompt + reply, "action_mask": mask}
