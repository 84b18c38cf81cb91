"""Estimate the paid calls of a run from a few of its episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scorekit.errors import UserError
from scorekit.paid.account import ApiUsage, max_usage, priced, sum_charges
from trainer.search.answer.config import AnsweringConfig, GeneratorConfig
from trainer.search.answer.models import estimated_words, max_verdict_usage
from trainer.search.answer.pipeline import evidence, is_asked
from trainer.search.records import ImageView, Question, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated usage of `episodes` episodes.

    sampled: number of episodes in the sample.
    num_requested: those that need the generator.
    paid: those of them with paid calls, whose tokens the server counted. The others are estimated,
    from the paid ones if there are some.
    generator, judge: max usage of all episodes: without equal requests and without cached answers.
    cap_episodes: how many the cap pays for; None without a cap or a price.
    """

    episodes: int
    sampled: int
    num_requested: int
    paid: int
    generator: ApiUsage
    judge: ApiUsage
    cap_episodes: int | None

    def lines(self) -> list[str]:
        """Return the estimate as lines of text."""
        texts = [
            f"{self.episodes:,} episodes, from {self.sampled}; of {self.num_requested} that need "
            f"the generator {self.paid} were paid for: the others are estimated, or were cached"
        ]
        for name, charge in (("generator", self.generator), ("judge", self.judge)):
            tokens = f"{charge.prompt_tokens:,} + {charge.completion_tokens:,} tokens"
            money = "" if charge.money is None else f", {charge.money:,.2f}"
            texts.append(f"{name}: at most {charge.calls:,} calls, {tokens}{money}")
        total = sum_charges([self.generator, self.judge]).money
        if total is not None:
            texts.append(f"in all: at most {total:,.2f}")
        if self.cap_episodes is not None:
            texts.append(f"the cap pays for {self.cap_episodes:,} episodes at least")
        return texts


def estimate(sample: Sequence[Trajectory], episodes: int, cfg: AnsweringConfig) -> Estimate:
    """Estimate calls, tokens and cost of `episodes` episodes from a sample, without a call.

    The episodes of the sample may have answers or not. Tokens that no server counted are estimated
    from the paid episodes; without any, from `tokens_per_image` and `max_output_tokens`, which is
    an upper bound. Raises UserError for an empty sample.
    """
    if not sample:
        raise UserError("estimate: the sample has no episode")
    need_answer = [t for t in sample if is_asked(t, cfg)]
    paid = [t for t in need_answer if t.answer is not None and t.answer.charge.calls]
    measured_cfg = _with_measured_tokens(paid, cfg.generator)
    factor = episodes / len(sample)
    answers = _scale([_of_generator(t, measured_cfg) for t in need_answer], factor)
    verdicts = _scale([_of_judge(t, cfg) for t in need_answer], factor)
    generator, judge = priced(answers, cfg.money.generator), priced(verdicts, cfg.money.judge)
    total, cap = sum_charges([generator, judge]).money, cfg.money.cap
    paid_for = int(cap * episodes / total) if cap is not None and total else None
    counts = len(sample), len(need_answer), len(paid)
    return Estimate(episodes, *counts, generator, judge, paid_for)


def worst_case(
    questions: Sequence[Question], episodes: int, num_images: int, cfg: AnsweringConfig
) -> Estimate:
    """Return the max usage without a sample.

    Each request has `num_images` images, at most `max_images`. An answer has `max_output_tokens`
    tokens, and the judge reads a text as long as the reference.
    """
    return estimate([_full(question, num_images) for question in questions], episodes, cfg)


def _full(question: Question, num_images: int) -> Trajectory:
    """Return an episode with `num_images` visible pages."""
    names = map(str, range(num_images))
    views = [ImageView.of_page(name, (1, 1), (1, 1), name) for name in names]
    turn = Turn(number=1, text="", action="search", views=views)
    return Trajectory(
        trajectory_id=question.id,
        run="",
        step=0,
        group=question.id,
        question=question,
        turns=[turn],
        end="forced",
    )


def _with_measured_tokens(paid: Sequence[Trajectory], cfg: GeneratorConfig) -> GeneratorConfig:
    """Return the config with the measured tokens of images and answers."""
    charges = [t.answer.charge for t in paid if t.answer is not None]
    if not charges:
        return cfg
    num_images = sum(len(_evidence(t, cfg)) for t in paid)
    image_tokens = sum(charge.prompt_tokens for charge in charges) - sum(
        _num_words(t, cfg) for t in paid
    )
    answer_tokens = -(-sum(charge.completion_tokens for charge in charges) // len(charges))
    tokens_per_image = (
        max(1, -(-image_tokens // num_images)) if num_images else cfg.tokens_per_image
    )
    update = {"tokens_per_image": tokens_per_image, "max_output_tokens": max(1, answer_tokens)}
    return cfg.model_copy(update=update)


def _evidence(trajectory: Trajectory, cfg: GeneratorConfig) -> list[ImageView]:
    return evidence(trajectory, cfg.max_images, cfg.crop_slots)


def _num_words(trajectory: Trajectory, cfg: GeneratorConfig) -> int:
    return estimated_words(cfg.system, trajectory.question.question)


def _scale(charges: Sequence[ApiUsage], factor: float) -> ApiUsage:
    total = sum_charges(charges)
    return ApiUsage(
        calls=round(factor * total.calls),
        prompt_tokens=round(factor * total.prompt_tokens),
        completion_tokens=round(factor * total.completion_tokens),
    )


def _of_generator(trajectory: Trajectory, cfg: GeneratorConfig) -> ApiUsage:
    if trajectory.answer is not None and trajectory.answer.charge.calls:
        return trajectory.answer.charge
    return max_usage(cfg, _num_words(trajectory, cfg), len(_evidence(trajectory, cfg)))


def _of_judge(trajectory: Trajectory, cfg: AnsweringConfig) -> ApiUsage:
    """Return the usage of all verdicts on an answer."""
    question = trajectory.question
    answer_text = (trajectory.answer and trajectory.answer.text) or question.reference_answer
    texts = question.question, answer_text, *question.reference_answers
    charges = [(trajectory.judged, max_verdict_usage(texts, 0, cfg.judge))]
    if cfg.judge.grounded:
        num_images = len(_evidence(trajectory, cfg.generator))
        charges.append((trajectory.grounded, max_verdict_usage(texts[:2], num_images, cfg.judge)))
    return sum_charges(
        judged.charge if judged is not None and judged.charge.calls else estimated
        for judged, estimated in charges
    )
