"""An episode's way from its end to a judged answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.search.answer.answers import PaidAnswers
from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.evidence import evidence
from trainer.search.answer.generator import Generator
from trainer.search.answer.judging import Judging
from trainer.search.answer.money import Money, together
from trainer.search.records import (
    Charge,
    GeneratedAnswer,
    JudgedAnswer,
    Question,
    Trajectory,
)

#: Ends of episodes that are answered: the policy's own, and that of its turns or its context. Who
#: gave the search up wants no answer, and a failed episode is not all that was played.
_ANSWERED = ("complete", "forced", "context")


def is_asked(trajectory: Trajectory, cfg: AnsweringConfig) -> bool:
    """Whether the generator is asked about a finished episode."""
    shown = any(turn.views for turn in trajectory.turns)
    return trajectory.end in _ANSWERED and (shown or cfg.judge.no_evidence == "ask")


class Answering:
    """Generator, judge and the file of what was paid for, of one run; in one process, which is rank
    0, and one event loop.

    cfg: of the run. run: its name. folder: the run's, where answers.sqlite lies unless the config
    names another file.

    `check` opens the file and meets the servers; `finish` an episode at a time, any number at once;
    `close` at the end. Raises UserError where the file cannot be had.
    """

    def __init__(self, cfg: AnsweringConfig, *, run: str, folder: Path) -> None:
        self.cfg = cfg
        self._path = folder / "answers.sqlite" if cfg.answers is None else Path(cfg.answers)
        self._run = run
        self._parts: tuple[PaidAnswers, Money, Generator, Judging] | None = None
        self._counts: Counter[str] = Counter()

    async def check(self) -> None:
        """Raises UserError where generator or judge is not there, or not as configured."""
        _, _, generator, judging = await self._opened()
        await generator.check()
        await judging.check()

    async def close(self) -> None:
        """Give up what is under way, and let go of all."""
        parts, self._parts = self._parts, None
        if parts is not None:
            kept, _, generator, judging = parts
            await generator.close()
            await judging.close()
            kept.close()

    @property
    def totals(self) -> Charge:
        """What the run has asked for since it began, earlier processes of it included."""
        return together(self.spent)

    @property
    def spent(self) -> dict[str, Charge]:
        """The same by server: generator, judge."""
        return {} if self._parts is None else self._parts[1].totals

    @property
    def judge_model(self) -> str:
        """The judge's model and revision, as it was met."""
        return "" if self._parts is None else self._parts[3].model

    def figures(self) -> dict[str, float]:
        """For a run's log: what was spent since the run began, and what became of the episodes that
        this process has finished."""
        found = {f"answers/{name}": float(count) for name, count in sorted(self._counts.items())}
        for server, charge in self.spent.items():
            found[f"cost/{server}_calls"] = float(charge.calls)
            found[f"cost/{server}_prompt_tokens"] = float(charge.prompt_tokens)
            found[f"cost/{server}_completion_tokens"] = float(charge.completion_tokens)
            if charge.money is not None:
                found[f"cost/{server}_money"] = charge.money
        if self._parts is not None:
            found["answers/damaged"] = float(self._parts[0].damaged)
            found["answers/retries"] = float(self._parts[2].retries)
        return found

    async def finish(self, trajectory: Trajectory, pictures: Callable[[str], bytes]) -> Trajectory:
        """A copy with the generator's answer and the verdicts on it.

        pictures: SHA-256 -> PNG of what the episode was shown; written before this is called.
        An episode that was given up, or failed, is not answered, and its verdict has no score; one
        without evidence is judged 0 and nobody is asked, unless the config has it asked for; of one
        without a reference the answer is not judged. What fails is a status: without an answer
        there is no verdict and no score. Raises MoneySpent, UserError.
        """
        _, _, generator, judging = await self._opened()
        if trajectory.end not in _ANSWERED:
            return self._unasked(trajectory, f"the episode's end: {trajectory.end}", None)
        if not is_asked(trajectory, self.cfg):
            return self._unasked(trajectory, "no evidence", 0.0)
        shown = evidence(trajectory, generator.cfg.max_images, generator.cfg.crop_slots)
        pngs = {image: pictures(image) for image in shown}
        asked = trajectory.question
        answer = await generator.answer(asked.question, pngs)
        self._counts["cached" if answer.charge.cached else answer.status] += 1
        if answer.text is None:
            failed = JudgedAnswer(status="failed", reason="no answer to judge", model=judging.model)
            grounded = failed if judging.cfg.grounded else None
            update = {"answer": answer, "judged": failed, "grounded": grounded}
            return trajectory.model_copy(update=update)
        judged, grounded = await self._judged(judging, asked, answer.text, pngs)
        self._counts[f"judged_{judged.status}"] += 1
        update = {"answer": answer, "judged": judged, "grounded": grounded}
        return trajectory.model_copy(update=update)

    async def _judged(
        self, judging: Judging, asked: Question, text: str, pngs: Mapping[str, bytes]
    ) -> tuple[JudgedAnswer, JudgedAnswer | None]:
        """Both verdicts, asked for at once."""
        judged = asyncio.create_task(_correctness(judging, asked, text))
        grounded = asyncio.create_task(_grounded(judging, asked, text, pngs))
        try:
            return await asyncio.gather(judged, grounded)
        finally:  # of one that raises the other is given up
            judged.cancel()
            grounded.cancel()

    def _unasked(self, trajectory: Trajectory, why: str, score: float | None) -> Trajectory:
        self._counts["no_evidence" if score is not None else "not_answered"] += 1
        answer = GeneratedAnswer(status="skipped", error=why)
        judged = JudgedAnswer(status="skipped", score=score, reason=why)
        return trajectory.model_copy(update={"answer": answer, "judged": judged})

    async def _opened(self) -> tuple[PaidAnswers, Money, Generator, Judging]:
        """Made in the loop that uses them."""
        if self._parts is None:
            kept = PaidAnswers(self._path, self._run)
            try:
                money = Money(self.cfg.money, kept.spent())
                generator = Generator(self.cfg.generator, kept, money)
                self._parts = kept, money, generator, Judging(self.cfg.judge, kept, money)
            except BaseException:
                kept.close()
                raise
        return self._parts


async def _correctness(judging: Judging, asked: Question, text: str) -> JudgedAnswer:
    if not asked.reference_answer:
        why = "the question has no reference answer"
        return JudgedAnswer(status="skipped", reason=why, model=judging.model)
    return await judging.correctness(asked.question, text, asked.reference_answer)


async def _grounded(
    judging: Judging, asked: Question, text: str, pngs: Mapping[str, bytes]
) -> JudgedAnswer | None:
    if not judging.cfg.grounded:
        return None
    if not pngs:  # nothing supports it
        why = "no evidence"
        return JudgedAnswer(status="skipped", score=0.0, reason=why, model=judging.model)
    return await judging.grounded(asked.question, text, list(pngs.values()))
