"""Answer and judge a finished episode from its images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scorekit.errors import UserError
from scorekit.net.loops import gather_or_cancel
from scorekit.paid.account import Account, ApiUsage
from scorekit.paid.answers import Store
from scorekit.paid.store import open_store
from trainer.search.answer.config import SEARCH, AnsweringConfig, GeneratorConfig
from trainer.search.answer.models import AnswerJudge, Generator
from trainer.search.records import (
    GeneratedAnswer,
    ImageView,
    JudgedAnswer,
    Question,
    Trajectory,
)

#: Ends of episodes that get an answer: by the policy, or because turns or context are used up. Not
#: episodes that were given up or that failed.
_ANSWERED = ("complete", "forced", "context")
#: The longest of the processes' waits is that of the run; the other stats add up.
_LONGEST = "reward_waited_s"


def is_asked(trajectory: Trajectory, cfg: AnsweringConfig) -> bool:
    """Return whether the generator gets a request for a finished episode."""
    has_views = any(turn.views for turn in trajectory.turns)
    return trajectory.end in _ANSWERED and (has_views or cfg.judge.no_evidence == "ask")


def answers_location(cfg: AnsweringConfig, folder: Path) -> str:
    """Return the file or Redis of paid answers of a run with this run directory."""
    return str(folder / "answers.sqlite") if cfg.answers is None else cfg.answers


def part_of_limits(cfg: AnsweringConfig, rank: int, size: int) -> AnsweringConfig:
    """Return a config with a process's part of the limits of calls in flight and per minute.

    rank, size: index of the process, and number of processes. Each may make at least one call.
    """

    def part(limit: int) -> int:
        return max(1, limit // size + (rank < limit % size))

    generator, judge = cfg.generator, cfg.judge
    limits = {
        "max_requests": part(generator.max_requests),
        "max_tokens": part(generator.max_tokens),
        "requests_per_minute": generator.requests_per_minute
        and generator.requests_per_minute / size,
    }
    return cfg.model_copy(
        update={
            "generator": generator.model_copy(update=limits),
            "judge": judge.model_copy(update={"max_in_flight": part(judge.max_in_flight)}),
        }
    )


def merge_step_stats(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the stats of a run from those of its processes, in any order.

    Of `AnswerPipeline.stats` and `RewardStream.stats`: counts and costs are summed, the longest
    wait counts. Means, shares and other counts of `RewardStream.stats` are left out: `step_stats`
    of all episodes has them.
    """
    merged: dict[str, float] = {}
    for stats in parts:
        for name, value in stats.items():
            if name == _LONGEST:
                merged[name] = max(merged.get(name, 0.0), value)
            elif name == "reward_dropped" or name.startswith(("answers/", "cost/")):
                merged[name] = merged.get(name, 0) + value
    return merged


def evidence(trajectory: Trajectory, max_images: int, crop_slots: int) -> list[ImageView]:
    """Return the views without duplicates: pages in order, then crops.

    Of `max_images` images, up to `crop_slots` are for crops. Pages may use free slots of crops, and
    crops free slots of pages. Of too many pages the first ones are used, of too many crops the last
    ones, which the policy reached through the earlier ones. A page with images of several sizes
    counts once, with its first image.
    """
    views = [view for turn in trajectory.turns for view in turn.views]
    first = {view.page_id: view for view in reversed(views) if view.kind == "page"}
    seen = [view.page_id for view in views if view.kind == "page"]
    pages = _distinct([first[page] for page in dict.fromkeys(seen)])
    page_images = {view.image for view in pages}
    crops = [view for view in views if view.kind == "crop" and view.image not in page_images]
    crops = _distinct(crops)
    num_crops = min(len(crops), crop_slots, max_images)
    pages = pages[: max_images - num_crops]
    free_slots = max_images - len(pages)
    return pages + (crops[-free_slots:] if free_slots else [])


def _distinct(views: list[ImageView]) -> list[ImageView]:
    """Return the first view of each image."""
    first: dict[str, ImageView] = {}
    for view in views:
        first.setdefault(view.image, view)
    return list(first.values())


def evidence_images(trajectory: Trajectory, cfg: GeneratorConfig) -> list[str]:
    """Return the SHA-256 of the images for the generator, in order (`evidence`).

    Raises UserError for an episode that was stored without originals if they are required.
    """
    images = []
    for view in evidence(trajectory, cfg.max_images, cfg.crop_slots):
        image = view.image if cfg.images == "shown" else view.original
        if image is None:
            raise UserError(
                f"answering.generator.images: original, but the episode {trajectory.trajectory_id} "
                f"was stored without the original of page {view.page_id}. Set it to shown, or "
                "begin a new run."
            )
        images.append(image)
    return images


class AnswerPipeline:
    """Generator, judge and the store of paid answers of one run.

    Use it in one event loop.
    cfg: of the run.
    run: its name.
    folder: run directory, which has answers.sqlite unless the config names another location.
    rank, size: of this process among those of the run, the first of which has to open the store
    before the others.

    `check` opens the store and checks the servers; `finish` handles one episode, any number
    concurrently; `close` at the end. Raises UserError if the store cannot be opened.
    """

    def __init__(
        self, cfg: AnsweringConfig, *, run: str, folder: Path, rank: int = 0, size: int = 1
    ) -> None:
        self.cfg = part_of_limits(cfg, rank, size)
        self._location, self._run, self._rank = answers_location(cfg, folder), run, rank
        self._parts: tuple[Store, Account, Generator, AnswerJudge] | None = None
        self._reported: dict[str, int] = {}

    async def check(self) -> None:
        """Raise UserError if generator or judge does not answer, or not as configured."""
        _, _, generator, judging = await self._open()
        await generator.check()
        await judging.check()

    async def close(self) -> None:
        """Cancel pending calls and close store and connections."""
        parts, self._parts = self._parts, None
        if parts is not None:
            store, _, generator, judging = parts
            await generator.close()
            await judging.close()
            await store.close()

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
        _, _, generator, judging = await self._open()
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
                (_correctness(judging, question, text), _ground(judging, question, text, pngs))
            )
            assert judged is not None
        update = {"answer": answer, "judged": judged, "grounded": grounded}
        return trajectory.model_copy(update=update)

    def _skip(self, trajectory: Trajectory, reason: str, score: float | None) -> Trajectory:
        answer = GeneratedAnswer(status="skipped", error=reason)
        judged = JudgedAnswer(status="skipped", score=score, reason=reason)
        return trajectory.model_copy(update={"answer": answer, "judged": judged})

    async def _open(self) -> tuple[Store, Account, Generator, AnswerJudge]:
        """Return the parts, created in the loop that uses them."""
        if self._parts is None:
            store = open_store(self._location, SEARCH, self._run, self._rank)
            try:
                money = self.cfg.money
                prices = {"generator": money.generator, "judge": money.judge}
                is_logging = not self._rank  # the main process logs the totals of the run
                account = Account(
                    money.cap, prices, store.spent, store.unfinished, is_logging=is_logging
                )
                generator = Generator(self.cfg.generator, store, account)
                judging = AnswerJudge(self.cfg.judge, store, account)
                self._parts = store, account, generator, judging
            except BaseException:
                await store.close()
                raise
        return self._parts


async def _correctness(judging: AnswerJudge, question: Question, text: str) -> JudgedAnswer:
    if not question.reference_answers:
        cause = "the question has no reference answer"
        return JudgedAnswer(status="skipped", reason=cause, model=judging.model)
    return await judging.correctness(question.question, text, question.reference_answers)


async def _ground(
    judging: AnswerJudge, question: Question, text: str, pngs: Mapping[str, bytes]
) -> JudgedAnswer | None:
    if not judging.cfg.grounded:
        return None
    if not pngs:  # no image can support the answer
        cause = "no evidence"
        return JudgedAnswer(status="skipped", score=0.0, reason=cause, model=judging.model)
    return await judging.grounded(question.question, text, list(pngs.values()))
