"""What a run will ask of its paid servers, from a few of its episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scorekit.errors import UserError
from trainer.search.answer.answering import is_asked
from trainer.search.answer.config import AnsweringConfig, GeneratorConfig
from trainer.search.answer.evidence import evidence
from trainer.search.answer.generator import reckoned_words
from trainer.search.answer.judging import reckoned_verdict
from trainer.search.answer.money import money_of, together
from trainer.search.records import Charge, Question, Trajectory, Turn, View


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of so many episodes. sampled: episodes it is drawn from; asked: those of them about which the
    generator is asked; paid: those of them that were paid for, so that the server's own count is
    known. The others are reckoned, after the paid ones where there are some.

    generator, judge: the most that all episodes take: what they do if no two ask the same, and none
    was answered before. cap_episodes: how many the cap pays for; None without a cap or a price.
    """

    episodes: int
    sampled: int
    asked: int
    paid: int
    generator: Charge
    judge: Charge
    cap_episodes: int | None

    def lines(self) -> list[str]:
        """For people."""
        found = [
            f"{self.episodes:,} episodes, from {self.sampled}; of {self.asked} that the generator "
            f"is asked about {self.paid} were paid for: the others are reckoned, or were known"
        ]
        for name, charge in (("generator", self.generator), ("judge", self.judge)):
            tokens = f"{charge.prompt_tokens:,} + {charge.completion_tokens:,} tokens"
            money = "" if charge.money is None else f", {charge.money:,.2f}"
            found.append(f"{name}: at most {charge.calls:,} calls, {tokens}{money}")
        total = together({"generator": self.generator, "judge": self.judge}).money
        if total is not None:
            found.append(f"in all: at most {total:,.2f}")
        if self.cap_episodes is not None:
            found.append(f"the cap pays for {self.cap_episodes:,} episodes at least")
        return found


def estimate(sample: Sequence[Trajectory], episodes: int, cfg: AnsweringConfig) -> Estimate:
    """Calls, tokens and money of so many episodes like those of the sample, which may be answered
    or not; nobody is asked.

    Tokens that no server has counted are reckoned: of pictures and answers as in the episodes that
    were paid for; without any, with `tokens_per_image`, and with all of `max_output_tokens`, which
    is more than most take. Raises UserError for an empty sample.
    """
    if not sample:
        raise UserError("estimate: no episode to draw it from")
    asked = [t for t in sample if is_asked(t, cfg)]
    known = [t for t in asked if t.answer is not None and t.answer.charge.calls]
    like = _learned(known, cfg.generator)
    generator = _scaled([_of_generator(t, like) for t in asked], episodes / len(sample))
    judge = _scaled([_of_judge(t, cfg) for t in asked], episodes / len(sample))
    charges = {
        name: charge.model_copy(
            update={"money": money_of(price, charge.prompt_tokens, charge.completion_tokens)}
        )
        for name, charge, price in (
            ("generator", generator, cfg.money.generator),
            ("judge", judge, cfg.money.judge),
        )
    }
    total, cap = together(charges).money, cfg.money.cap
    paid_for = int(cap * episodes / total) if cap is not None and total else None
    return Estimate(
        episodes,
        len(sample),
        len(asked),
        len(known),
        charges["generator"],
        charges["judge"],
        paid_for,
    )


def most(
    questions: Sequence[Question], episodes: int, pictures: int, cfg: AnsweringConfig
) -> Estimate:
    """The same where no episode is known: each asks about so many pictures, or `max_images`; its
    answer takes all of `max_output_tokens`, and is judged as one as long as the reference."""
    return estimate([_full(question, pictures) for question in questions], episodes, cfg)


def _full(question: Question, pictures: int) -> Trajectory:
    """An episode that was shown so many pages."""
    views = [
        View(
            kind="page",
            page_id=str(number),
            width=1,
            height=1,
            region=(0, 0, 1, 1),
            page_width=1,
            page_height=1,
            image=str(number),
        )
        for number in range(pictures)
    ]
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


def _learned(known: Sequence[Trajectory], cfg: GeneratorConfig) -> GeneratorConfig:
    """The config with what pictures and answers have really taken."""
    charges = [t.answer.charge for t in known if t.answer is not None]
    if not charges:
        return cfg
    pictures = sum(len(_shown(t, cfg)) for t in known)
    beside = sum(charge.prompt_tokens for charge in charges) - sum(_words(t, cfg) for t in known)
    said = -(-sum(charge.completion_tokens for charge in charges) // len(charges))
    each = max(1, -(-beside // pictures)) if pictures else cfg.tokens_per_image
    learned = {"tokens_per_image": each, "max_output_tokens": max(1, said)}
    return cfg.model_copy(update=learned)


def _shown(trajectory: Trajectory, cfg: GeneratorConfig) -> list[str]:
    return evidence(trajectory, cfg.max_images, cfg.crop_slots)


def _words(trajectory: Trajectory, cfg: GeneratorConfig) -> int:
    return reckoned_words(cfg.system, trajectory.question.question)


def _scaled(charges: Sequence[Charge], factor: float) -> Charge:
    def total(of: Callable[[Charge], int]) -> int:
        return round(factor * sum(of(charge) for charge in charges))

    return Charge(
        calls=total(lambda c: c.calls),
        prompt_tokens=total(lambda c: c.prompt_tokens),
        completion_tokens=total(lambda c: c.completion_tokens),
    )


def _of_generator(trajectory: Trajectory, cfg: GeneratorConfig) -> Charge:
    if trajectory.answer is not None and trajectory.answer.charge.calls:
        return trajectory.answer.charge
    prompt = _words(trajectory, cfg) + len(_shown(trajectory, cfg)) * cfg.tokens_per_image
    return Charge(calls=1, prompt_tokens=prompt, completion_tokens=cfg.max_output_tokens)


def _of_judge(trajectory: Trajectory, cfg: AnsweringConfig) -> Charge:
    """Of all verdicts on an answer."""
    question = trajectory.question
    said = (trajectory.answer and trajectory.answer.text) or question.reference_answer
    texts = question.question, said, question.reference_answer
    charges = [(trajectory.judged, reckoned_verdict(texts, 0, cfg.judge))]
    if cfg.judge.grounded:
        shown = len(_shown(trajectory, cfg.generator))
        charges.append((trajectory.grounded, reckoned_verdict(texts[:2], shown, cfg.judge)))
    known = [
        judged.charge if judged is not None and judged.charge.calls else reckoned
        for judged, reckoned in charges
    ]
    return together({str(number): charge for number, charge in enumerate(known)})
