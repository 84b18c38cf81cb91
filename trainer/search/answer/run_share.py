"""Start and end what the processes of a run share about paid calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from trainer.search.answer.answer_cache import judge_of
from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.rank_files import (
    copy_answers,
    known_file,
    rank_file,
    take_over,
    take_over_left,
)
from trainer.search.answer.shared_calls import SharedAnswerCache, SharedCalls
from trainer.search.answer.shared_money import SharedAccount

if TYPE_CHECKING:
    from trainer.rl.distributed import DistributedContext

#: The longest of the processes' waits is that of the run; the other stats add up.
_LONGEST = "reward_waited_s"


class RunShare:
    """Holds what one process shares with the others of its run: claims, answers, judge and money.

    Every process has to create it, before any paid call. The main process first takes over what
    processes of an earlier start have left. Raises UserError on the main process; the others then
    exit (`DistributedContext.on_main`).
    """

    def __init__(self, path: Path, run: str, world: DistributedContext) -> None:
        self._path, self._run, self._world = path.absolute(), run, world
        self._start = world.gather([uuid4().hex[:8]])[0]
        self.calls = SharedCalls(world.store(f"paid calls {self._start}"))
        self._cache: SharedAnswerCache | None = None
        world.on_main(self._begin)

    def open_cache(self) -> SharedAnswerCache:
        """Return this process's file of paid answers, opened once."""
        if self._cache is None:
            own_file = rank_file(self._path, self._run, self._start, self.calls.rank)
            known_answers = known_file(self._path, self._run)
            self._cache = SharedAnswerCache(own_file, self._run, self.calls, known_answers)
        return self._cache

    def close(self) -> None:
        """Close this process's file."""
        if self._cache is not None:
            self._cache.close()
        self.calls.close()

    def end(self) -> None:
        """Take the files of all processes over into the main one.

        Every process has to call it after `close`, at the end of a run without an error.
        """
        self._world.barrier()
        if self._world.is_main:
            take_over_left(self._path, self._run)

    def _begin(self) -> None:
        self._cache = SharedAnswerCache(self._path, self._run, self.calls, None)
        try:
            take_over(self._cache, self._run)
            copy_answers(self._cache, known_file(self._path, self._run))
            SharedAccount(self.calls.store).open(self._cache.spent())
            first_judge = judge_of(self._path, self._run)
        except BaseException:
            self.close()
            raise
        if first_judge is not None:
            self.calls.store.set("judge", first_judge)


def share_paid_calls(path: Path, run: str, world: DistributedContext | None) -> RunShare | None:
    """Return what this process shares with the others; None if it is the only one.

    Every process has to call it. A single one takes over what several have left. Raises UserError.
    """
    if world is not None and world.size > 1:
        return RunShare(path, run, world)
    take_over_left(path, run)
    return None


def part_of_limits(cfg: AnsweringConfig, calls: SharedCalls) -> AnsweringConfig:
    """Return a config with this process's part of the limits of calls in flight and per minute."""
    generator, judge = cfg.generator, cfg.judge
    limits = {
        "max_requests": calls.part(generator.max_requests),
        "max_tokens": calls.part(generator.max_tokens),
        "requests_per_minute": generator.requests_per_minute
        and generator.requests_per_minute / calls.size,
    }
    in_flight = {"max_in_flight": calls.part(judge.max_in_flight)}
    return cfg.model_copy(
        update={
            "generator": generator.model_copy(update=limits),
            "judge": judge.model_copy(update=in_flight),
        }
    )


def merge_step_stats(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the stats of a run from those of its processes, in any order.

    Of `AnswerPipeline.stats` and `RewardStream.stats`: counts and costs are summed, the longest
    wait counts. Means, shares and other counts of `RewardStream.stats` are left out: `step_stats`
    of all episodes has them.
    """
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name == _LONGEST:
                merged[name] = max(merged.get(name, 0.0), value)
            elif name == "reward_dropped" or name.startswith(("answers/", "cost/")):
                merged[name] = merged.get(name, 0) + value
    return merged
