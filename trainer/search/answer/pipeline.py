"""Answer and judge a finished episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scorekit.net.tasks import gather_or_cancel
from trainer.search.answer.answer_cache import PaidAnswerCache
from trainer.search.answer.answer_judge import AnswerJudge
from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.evidence import evidence_images
from trainer.search.answer.generator import Generator
from trainer.search.answer.run_share import RunShare, part_of_limits
from trainer.search.answer.shared_money import SharedSpendTracker
from trainer.search.answer.spending import SpendTracker
from trainer.search.records import (
    ApiUsage,
    GeneratedAnswer,
    JudgedAnswer,
    Question,
    Trajectory,
)

#: Ends of episodes that get an answer: by the policy, or because turns or context are used up. Not
#: episodes that were given up or that failed.
_ANSWERED = ("complete", "forced", "context")


def is_asked(trajectory: Trajectory, cfg: AnsweringConfig) -> bool:
    """Return whether the generator gets a request for a finished episode."""
    has_views = any(turn.views for turn in trajectory.turns)
    return trajectory.end in _ANSWERED and (has_views or cfg.judge.no_evidence == "ask")


def answers_path(cfg: AnsweringConfig, folder: Path) -> Path:
    """Return the main file of paid answers of a run with this run directory."""
    return folder / "answers.sqlite" if cfg.answers is None else Path(cfg.answers)


class AnswerPipeline:
    """Generator, judge and the file of paid answers of one run.

    Use it in one event loop. cfg: of the run. run: its name. folder: run directory, which has
    answers.sqlite unless the config names another file. shared: what this process shares with the
    others of the run; None: there is no other.

    `check` opens the file and checks the servers; `finish` handles one episode, any number
    concurrently; `close` at the end. Raises UserError if the file cannot be opened.
    """

    def __init__(
        self, cfg: AnsweringConfig, *, run: str, folder: Path, shared: RunShare | None = None
    ) -> None:
        self.cfg = cfg if shared is None else part_of_limits(cfg, shared.calls)
        self._path, self._run, self._shared = answers_path(cfg, folder), run, shared
        self._parts: tuple[PaidAnswerCache, SpendTracker, Generator, AnswerJudge] | None = None
        self._reported: dict[str, int] = {}

    async def check(self) -> None:
        """Raise UserError if generator or judge does not answer, or not as configured."""
        _, _, generator, judging = await self._opened()
        await generator.check()
        await judging.check()

    async def close(self) -> None:
        """Cancel pending calls and close file and connections."""
        parts, self._parts = self._parts, None
        if parts is not None:
            paid_answers, _, generator, judging = parts
            await generator.close()
            await judging.close()
            paid_answers.close()

    @property
    def spent(self) -> dict[str, ApiUsage]:
        """Return the usage of the run by server (generator, judge), including earlier starts.

        Of several processes, the main one has all earlier usage and its own, and each other one
        only its own.
        """
        return {} if self._parts is None else self._parts[1].totals

    @property
    def judge_model(self) -> str:
        """Return the judge's model and revision, as the service reported them."""
        return "" if self._parts is None else self._parts[3].model

    def stats(self) -> dict[str, float]:
        """Return stats for the log: usage (`spent`), and retries and damaged answers since the last
        call.

        Those of several processes are summed by `merge_step_stats`. What became of the answers is
        counted from the episodes (`answer_stats`).
        """
        stats: dict[str, float] = {}
        for server, charge in self.spent.items():
            used = charge.model_dump(exclude={"cached"}, exclude_none=True)
            stats |= {f"cost/{server}_{name}": float(value) for name, value in used.items()}
        if self._parts is not None:
            totals = {"damaged": self._parts[0].damaged, "retries": self._parts[2].retries}
            for name, total in totals.items():
                stats[f"answers/{name}"] = float(total - self._reported.get(name, 0))
            self._reported = totals
        return stats

    async def finish(
        self, trajectory: Trajectory, load_image: Callable[[str], bytes]
    ) -> Trajectory:
        """Return a copy of an episode with the generator's answer and its verdicts.

        load_image: SHA-256 -> PNG of the episode's images. An episode that was given up or failed
        gets no answer, and its verdict has no score. One without evidence scores 0 without a call,
        unless the config asks for one. Without a reference the answer is not judged. A failure
        becomes a status: without an answer there is no verdict and no score. Raises BudgetExceeded,
        UserError.
        """
        _, _, generator, judging = await self._opened()
        if trajectory.end not in _ANSWERED:
            return self._skip(trajectory, f"the episode's end: {trajectory.end}", None)
        if not is_asked(trajectory, self.cfg):
            return self._skip(trajectory, "no evidence", 0.0)
        pngs = {image: load_image(image) for image in evidence_images(trajectory, generator.cfg)}
        question = trajectory.question
        answer = await generator.answer(question.question, pngs)
        judged: JudgedAnswer | None
        if (text := answer.text) is None:
            judged = JudgedAnswer(status="failed", reason="no answer to judge", model=judging.model)
            grounded = judged if judging.cfg.grounded else None
        else:
            judged, grounded = await gather_or_cancel(
                (_correctness(judging, question, text), _grounded(judging, question, text, pngs))
            )
            assert judged is not None
        update = {"answer": answer, "judged": judged, "grounded": grounded}
        return trajectory.model_copy(update=update)

    def _skip(self, trajectory: Trajectory, reason: str, score: float | None) -> Trajectory:
        answer = GeneratedAnswer(status="skipped", error=reason)
        judged = JudgedAnswer(status="skipped", score=score, reason=reason)
        return trajectory.model_copy(update={"answer": answer, "judged": judged})

    async def _opened(self) -> tuple[PaidAnswerCache, SpendTracker, Generator, AnswerJudge]:
        """Return the parts, created in the loop that uses them."""
        if self._parts is None:
            shared = self._shared
            paid_answers = (
                PaidAnswerCache(self._path, self._run) if shared is None else shared.open_cache()
            )
            try:
                money = (
                    SpendTracker(self.cfg.money, paid_answers.spent())
                    if shared is None
                    else SharedSpendTracker(self.cfg.money, paid_answers.spent(), shared.calls)
                )
                generator = Generator(self.cfg.generator, paid_answers, money)
                judging = AnswerJudge(self.cfg.judge, paid_answers, money)
                self._parts = paid_answers, money, generator, judging
            except BaseException:
                paid_answers.close()
                raise
        return self._parts


async def _correctness(judging: AnswerJudge, question: Question, text: str) -> JudgedAnswer:
    if not question.reference_answers:
        cause = "the question has no reference answer"
        return JudgedAnswer(status="skipped", reason=cause, model=judging.model)
    return await judging.correctness(question.question, text, question.reference_answers)


async def _grounded(
    judging: AnswerJudge, question: Question, text: str, pngs: Mapping[str, bytes]
) -> JudgedAnswer | None:
    if not judging.cfg.grounded:
        return None
    if not pngs:  # no image can support the answer
        cause = "no evidence"
        return JudgedAnswer(status="skipped", score=0.0, reason=cause, model=judging.model)
    return await judging.grounded(question.question, text, list(pngs.values()))
