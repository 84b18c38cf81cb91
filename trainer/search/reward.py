"""Turn a finished episode into its reward, while other episodes still run.

The pure functions come first: the reward from answer, verdict and pages (NDCG). `RewardStream` asks
generator and judge as each episode ends. The stats of a step's rewards are at the end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean
from typing import TYPE_CHECKING

from scorekit.net.loops import LoopThread
from trainer.search.config import GoldUnit, SearchRewardConfig
from trainer.search.records import (
    EpisodeReward,
    GeneratedAnswer,
    JudgedAnswer,
    Question,
    Status,
    Trajectory,
)

if TYPE_CHECKING:
    from trainer.search.answer.pipeline import AnswerPipeline

NO_GOLD = "the question names no gold page"


def skip_reward(trajectory: Trajectory, cfg: SearchRewardConfig) -> Trajectory | None:
    """Return the episode with a skipped answer if its reward does not depend on one.

    None: generator and judge are needed. An episode that gave up (`declined`) has no answer to
    judge; if the judge has a weight its score is 0.
    """
    reason = _skip_reason(trajectory, cfg)
    if reason is None:
        return None
    given_up = trajectory.end == "declined" and cfg.weights["judge"] > 0
    return trajectory.model_copy(
        update={
            "answer": GeneratedAnswer(status="skipped", error=reason),
            "judged": JudgedAnswer(
                status="skipped", score=0.0 if given_up else None, reason=reason
            ),
        }
    )


def with_reward(trajectory: Trajectory, cfg: SearchRewardConfig) -> Trajectory:
    """Return the episode with its NDCG and reward.

    reward = w_judge * score + w_ndcg * NDCG + w_format * format, where format is 1 or 0; a gate
    makes it 0 if format is 0. If a component with a weight is missing, there is no value: the
    status is failed or late, never 0. A forced end gets 0 or a penalty, or is scored as any other
    (`forced_completion`).
    """
    value = ndcg(trajectory.shown_pages, trajectory.question, cfg.ndcg_gold)
    return trajectory.model_copy(update={"ndcg": value, "reward": _reward(trajectory, value, cfg)})


def ndcg(
    pages_in_order: Sequence[str], question: Question, gold: GoldUnit = "page"
) -> float | None:
    """Return the normalized discounted cumulative gain of visible pages in their order.

    None for a question without a gold page. Gain is binary, the discount log2(rank + 1) (Burges et
    al., 2005), without a cut-off. The rank is that among the visible pages, not that of the search
    engine; a repeated page counts at its first rank. The ideal has a gold page at each rank.

    A gold page counts once, and a page counts for one gold page, so the value is at most 1 even if
    several pages match a gold page or one page matches several. The best pairing counts.
    """
    pages = list(dict.fromkeys(pages_in_order))
    if gold == "document":
        keys = [_document(page) for page in pages]
        golds = [{document} for document in dict.fromkeys(map(_document, question.gold))]
    else:
        alternatives = question.alternatives if gold == "alternatives" else {}
        keys = pages
        golds = [{page, *alternatives.get(page, ())} for page in dict.fromkeys(question.gold)]
    if not golds:
        return None
    paired: dict[int, str] = {}
    # Pairing greedily by rank gives the greatest sum: the sets of pages that can be paired are
    # a matroid.
    gain = sum(
        _discount(rank) for rank, page in enumerate(keys, 1) if _pair(page, golds, paired, set())
    )
    return gain / sum(_discount(rank) for rank in range(1, len(golds) + 1))


def format_error(trajectory: Trajectory) -> str | None:
    """Return the first format error of an episode as `turn N: reason`, or None.

    Every turn that the policy wrote counts: an invalid action (a wrong form, or a box outside the
    image) is an error. A forced turn or a forced end is not.
    """
    turns = [turn for turn in trajectory.turns if not turn.forced]
    if not turns:
        return "no turn"
    for turn in turns:
        if turn.action == "invalid":
            return f"turn {turn.number}: {turn.reason}"
        if turn.action == "complete" and turn is not turns[-1]:
            return f"turn {turn.number}: the episode went on behind its end"
    return None


def _skip_reason(trajectory: Trajectory, cfg: SearchRewardConfig) -> str | None:
    if trajectory.end == "failed":
        return trajectory.end_detail or "the episode failed"
    if trajectory.end == "declined":
        return "the search was given up"
    if not cfg.weights["judge"]:
        return "the judge has no weight"
    if cfg.gate and (error := format_error(trajectory)):
        return f"not well-formed: {error}"
    if _is_forced(trajectory) and cfg.forced_completion == "zero":
        return "its end was forced"
    if cfg.weights["ndcg"] and not trajectory.question.gold:
        return NO_GOLD
    return None


def _reward(
    trajectory: Trajectory, ndcg_value: float | None, cfg: SearchRewardConfig
) -> EpisodeReward:
    if trajectory.end in (None, "failed"):
        return EpisodeReward(status="failed", error=trajectory.end_detail or "it has no end")
    form_reason, judged = format_error(trajectory), trajectory.judged
    parts = {"format": 0.0 if form_reason else 1.0}
    if ndcg_value is not None:
        parts["ndcg"] = ndcg_value
    if judged is not None and judged.score is not None:
        parts["judge"] = judged.score
    gated, forced = bool(cfg.gate and form_reason), _is_forced(trajectory)
    if gated or (forced and cfg.forced_completion == "zero"):
        return EpisodeReward(status="ok", value=0.0, parts=parts, gated=gated)
    weights = {part: weight for part, weight in cfg.weights.items() if weight}
    if weights.keys() - parts:
        return _missing_reward(trajectory, parts)
    value = sum(weight * parts[part] for part, weight in weights.items())
    if forced and cfg.forced_completion == "penalty":
        value -= cfg.forced_penalty
    return EpisodeReward(status="ok", value=value, parts=parts)


def _missing_reward(trajectory: Trajectory, parts: dict[str, float]) -> EpisodeReward:
    """Return a reward without a value and its reason, if possible that of the answer."""
    answer, judged = trajectory.answer, trajectory.judged
    late = "late" in (answer and answer.status, judged and judged.status)
    reason = _missing_reason(answer) or _missing_reason(judged) or "it was not judged"
    return EpisodeReward(status="late" if late else "failed", error=reason, parts=parts)


def _missing_reason(part: GeneratedAnswer | JudgedAnswer | None) -> str | None:
    """Return why an answer or a verdict is missing, or None.

    The service's name stands before it if a model was asked and failed.
    """
    if part is None:
        return None
    if isinstance(part, GeneratedAnswer):
        service, reason = "generator", part.error
    else:
        service, reason = "judge", part.reason
    return f"{service}: {reason}" if reason and part.model and part.status == "failed" else reason


def _is_forced(trajectory: Trajectory) -> bool:
    """Return whether turns or context were used up, so the policy did not choose the end."""
    return trajectory.end in ("forced", "context")


def _pair(page: str, golds: Sequence[set[str]], paired: dict[int, str], tried: set[int]) -> bool:
    """Pair a page with a gold page and return whether that is possible.

    Pages that are paired already may move to other gold pages (Kuhn's augmenting path).
    """
    for index, pages in enumerate(golds):
        if page in pages and index not in tried:
            tried.add(index)
            if index not in paired or _pair(paired[index], golds, paired, tried):
                paired[index] = page
                return True
    return False


def _discount(rank: int) -> float:
    return 1 / log2(rank + 1)


def _document(page_id: str) -> str:
    """Return the document of a page id, which is the file's stem, `_`, the page number."""
    return page_id.rpartition("_")[0]


#: The key of an episode: run, step, trajectory_id, attempt.
Key = tuple[str, int, str, int]
#: Seconds between two checks while waiting, so a signal is handled soon.
TICK_S = 0.5


@dataclass(eq=False, slots=True)
class _Pending:
    """A submitted episode with its final state, or an error that ends the run."""

    trajectory: Trajectory
    final: Trajectory | None = None
    error: Exception | None = None


class WaitAborted(Exception):
    """The run has to stop before all rewards were available."""


class RewardStream:
    """The rewards of a run's episodes. Threads may share it.

    cfg: weights of the reward.
    answering: generator and judge; None if no weight needs them, so there is no paid call.
    load_image: SHA-256 -> PNG.

    `submit` each episode when it ends, and `collect` a step when all its episodes have ended. The
    key of an episode is run, step, trajectory_id and attempt, so the order of ends, answers and
    collections does not matter. Raises ValueError if the judge has a weight and there is no
    answering.
    """

    def __init__(
        self,
        cfg: SearchRewardConfig,
        answering: AnswerPipeline | None,
        load_image: Callable[[str], bytes],
    ) -> None:
        if cfg.weights["judge"] and answering is None:
            raise ValueError("the judge has a weight: generator and judge are needed")
        self._cfg, self._answering, self._load_image = cfg, answering, load_image
        self._thread = None if answering is None else LoopThread("reward stream")
        self._pending: dict[Key, _Pending] = {}
        self._changed = threading.Condition()
        self._fatal: Exception | None = None
        self._is_closed = False
        self._dropped = 0
        self._collected = threading.local()

    @property
    def stats(self) -> dict[str, float]:
        """Return the stats of the last step that this thread has collected, for the run's log."""
        return getattr(self._collected, "stats", {})

    def check(self) -> None:
        """Raise UserError if generator or judge does not answer or is not as configured."""
        if self._thread is not None and self._answering is not None:
            self._thread.run(self._answering.check())

    def submit(self, trajectory: Trajectory) -> None:
        """Start the answer and verdict of a finished episode and return at once.

        Neither this class nor the caller may change the episode. Raises ValueError for an episode
        that still runs or was submitted before, and the error that ended the run (`collect`).
        """
        if trajectory.end is None:
            raise ValueError(f"{trajectory.trajectory_id}: the episode has not ended")
        key = (trajectory.run, trajectory.step, trajectory.trajectory_id, trajectory.attempt)
        pending = _Pending(trajectory)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            if key in self._pending:
                raise ValueError(f"submitted before: {key}")
            self._pending[key] = pending
        skipped = skip_reward(trajectory, self._cfg)
        if skipped is not None:
            self._settle(key, pending, skipped)
            return
        assert self._thread is not None and self._answering is not None
        self._thread.submit(self._ask(self._answering, key, pending))

    def collect(
        self,
        step: int,
        group_by_id: Mapping[str, str],
        deadline_s: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Trajectory]:
        """Return the episodes of a step with their rewards, after waiting at most `deadline_s`.

        group_by_id: trajectory_id -> its group; all were submitted. The result has its order.
        should_stop: is checked while waiting.

        If a step is repeated, the latest attempt counts. Episodes without a reward are included
        (`EpisodeReward.status`), but do not count in their group. One without an answer at the
        deadline is late: its calls continue to their own deadline, because they are paid for and
        the answer is stored, but here the result is dropped and counted. Raises WaitAborted if
        `should_stop` is true, ValueError for an id that was not submitted or has another group, and
        what `AnswerPipeline.finish` raised (the money is spent); then `so_far` returns the
        available results.
        """
        started_at = time.monotonic()
        with self._changed:
            if self._fatal is not None:  # then not all episodes were accepted
                raise self._fatal
            keys = self._keys(step, group_by_id)
            submitted = [self._pending[key] for key in keys]
            waiting = self._wait(
                list(submitted),
                started_at + deadline_s,
                lambda: self._fatal is not None or should_stop(),
            )
            if self._fatal is not None:
                raise self._fatal
            if waiting and should_stop():
                raise WaitAborted
            popped = {key[2]: self._pending.pop(key) for key in keys}
            for key in [key for key in self._pending if key[1] == step]:  # earlier attempts
                # An unfinished one counts when it ends.
                self._dropped += self._pending.pop(key).final is not None
            dropped, self._dropped = self._dropped, 0
        collected = {
            id: submitted.final
            or self._without_answer(submitted.trajectory, "late", f"no answer in {deadline_s:g} s")
            for id, submitted in popped.items()
        }
        self._collected.stats = step_stats(collected) | {
            "reward_waited_s": round(time.monotonic() - started_at, 3),
            "reward_dropped": dropped,
        }
        return collected

    def so_far(self, step: int, max_wait_s: float = 0.0) -> list[Trajectory]:
        """Return the episodes of a step that was not collected, for the store of a run that ends.

        An episode without an answer is failed.
        max_wait_s: max seconds to wait for pending answers, which are paid for; `close` ends the
        wait.
        """
        with self._changed:
            of_step = [pending for key, pending in self._pending.items() if key[1] == step]
            until = time.monotonic() + max_wait_s
            self._wait(list(of_step), until, lambda: self._is_closed)
            return [
                pending.final
                or self._without_answer(
                    pending.trajectory, "failed", str(pending.error or "the run ended before")
                )
                for pending in of_step
            ]

    async def reward(self, trajectory: Trajectory, deadline_s: float) -> Trajectory:
        """Return a finished episode with its reward, outside of any step; any loop may wait for it.

        If there is no answer after `deadline_s`, the reward is late and has no value. The calls
        continue, because they are paid for and the answer is stored. Raises ValueError for an
        episode that still runs, and what `AnswerPipeline.finish` raises, also for each later
        episode (the money is spent).
        """
        if trajectory.end is None:
            raise ValueError(f"{trajectory.trajectory_id}: the episode has not ended")
        skipped = skip_reward(trajectory, self._cfg)
        if skipped is not None:
            return with_reward(skipped, self._cfg)
        if self._fatal is not None:
            # Without the traceback of the last time, which would grow with each episode.
            raise self._fatal.with_traceback(None)
        assert self._thread is not None and self._answering is not None
        answer = self._thread.submit(self._answering.finish(trajectory, self._load_image))
        try:
            waiting = asyncio.shield(asyncio.wrap_future(answer))
            return with_reward(await asyncio.wait_for(waiting, deadline_s), self._cfg)
        except TimeoutError:
            return self._without_answer(trajectory, "late", f"no answer in {deadline_s:g} s")
        except asyncio.CancelledError:
            if answer.cancelled():  # by `close`, and not by the caller's own end
                raise RuntimeError("the reward stream is closed") from None
            raise
        except Exception as error:
            self._fatal = self._fatal or error
            raise

    def close(self) -> None:
        """Cancel pending calls. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._answering is not None:
            self._thread.stop(self._answering.close)

    def _wait(self, waiting: list[_Pending], until: float, should_stop: Callable[[], bool]) -> bool:
        """Wait for all results, the time `until`, or `should_stop`.

        Return whether a result is still missing.
        """
        while waiting and not should_stop():
            if waiting[-1].final is not None or waiting[-1].error is not None:
                waiting.pop()
            elif (remaining_s := until - time.monotonic()) > 0:
                self._changed.wait(min(remaining_s, TICK_S))
            else:
                break
        return bool(waiting)

    def _keys(self, step: int, group_by_id: Mapping[str, str]) -> list[Key]:
        """Return the key of the latest attempt of each episode."""
        latest: dict[str, Key] = {}
        for key in sorted(key for key in self._pending if key[1] == step):
            if key[2] in group_by_id:
                latest[key[2]] = key
        wrong = [
            id
            for id, group in group_by_id.items()
            if id not in latest or self._pending[latest[id]].trajectory.group != group
        ]
        if wrong:
            raise ValueError(f"step {step}: not submitted, or of another group: {wrong[:3]}")
        return [latest[id] for id in group_by_id]

    async def _ask(self, answering: AnswerPipeline, key: Key, pending: _Pending) -> None:
        try:
            self._settle(key, pending, await answering.finish(pending.trajectory, self._load_image))
        except Exception as error:
            with self._changed:
                pending.error = error
                self._fatal = self._fatal or error
                self._changed.notify_all()

    def _settle(self, key: Key, pending: _Pending, answered: Trajectory) -> None:
        final = with_reward(answered, self._cfg)
        with self._changed:
            if self._pending.get(key) is pending:
                pending.final = final
            else:  # its step is over, and no other step may get it
                self._dropped += 1
            self._changed.notify_all()

    def _without_answer(self, trajectory: Trajectory, status: Status, reason: str) -> Trajectory:
        update = {
            "answer": GeneratedAnswer(status=status, error=reason),
            "judged": JudgedAnswer(status=status, reason=reason),
        }
        return with_reward(trajectory.model_copy(update=update), self._cfg)


PARTS = ("judge", "ndcg", "format")


def group_rewards(collected: Mapping[str, Trajectory]) -> dict[str, dict[str, float]]:
    """Return the rewards of each group by trajectory id.

    Failed and late episodes are not in their group, which may be smaller than sampled, or empty.
    """
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for id, trajectory in collected.items():
        of_group = groups[trajectory.group]
        if trajectory.reward_value is not None:
            of_group[id] = trajectory.reward_value
    return dict(groups)


def without_spread(final: Mapping[str, Trajectory]) -> set[str]:
    """Return the groups with equal rewards or with fewer than two rewards: they teach nothing."""
    return {
        group for group, rewards in group_rewards(final).items() if len(set(rewards.values())) < 2
    }


def step_stats(collected: Mapping[str, Trajectory]) -> dict[str, float]:
    """Return the stats of episodes and groups.

    Groups: how many were sampled, miss an episode, or are too small for a comparison.
    """
    sampled, groups = Counter(t.group for t in collected.values()), group_rewards(collected)
    return reward_stats(list(collected.values())) | {
        "groups": len(groups),
        "groups_smaller": sum(len(rewards) < sampled[group] for group, rewards in groups.items()),
        # A group sampled with one episode never has a comparison.
        "groups_lost": sum(
            len(rewards) < min(2, sampled[group]) for group, rewards in groups.items()
        ),
    }


def reward_stats(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return means and coverages of the reward and its components, and counts of failures."""
    rewards = [t.reward for t in episodes if t.reward is not None]
    statuses = Counter(reward.status for reward in rewards)
    stats = {
        "reward_coverage": _share(statuses["ok"], len(episodes)),
        "reward_failed": statuses["failed"],
        "reward_late": statuses["late"],
        "reward_gated": sum(reward.gated for reward in rewards),
        "answers_failed": sum(_status(t.answer) == "failed" for t in episodes),
        "judgements_failed": sum(
            _status(t.answer) == "ok" and _status(t.judged) == "failed" for t in episodes
        ),
        "no_evidence": sum(_is_without_evidence(t) for t in episodes),
        "forced_share": _share(sum(t.forced for t in episodes), len(episodes)),
    }
    values = [reward.value for reward in rewards if reward.value is not None]
    stats |= _mean("reward", values)
    for part in PARTS:
        values_of_part = [reward.parts[part] for reward in rewards if part in reward.parts]
        stats |= {f"{part}_coverage": _share(len(values_of_part), len(episodes))} | _mean(
            part, values_of_part
        )
    return stats


def answer_stats(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Return what became of the answers and verdicts of episodes, as `answers/OUTCOME`.

    Of answers: ok, failed, late, no_evidence (scored 0 without a call), not_answered (given up, or
    the reward does not need one); cached: those of ok that were known before, at no cost. Of
    verdicts on answers: judged_ok, judged_failed, judged_skipped, judged_late.
    """
    counts: Counter[str] = Counter()
    for trajectory in episodes:
        answer, judged = trajectory.answer, trajectory.judged
        if answer is None:
            continue
        if answer.status == "skipped":
            counts["no_evidence" if _is_without_evidence(trajectory) else "not_answered"] += 1
        else:
            counts[answer.status] += 1
            counts["cached"] += answer.charge.cached
        if answer.status == "ok" and judged is not None:
            counts[f"judged_{judged.status}"] += 1
    return {f"answers/{outcome}": float(count) for outcome, count in sorted(counts.items())}


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


def _mean(name: str, values: list[float]) -> dict[str, float]:
    """Return the mean; nothing for an empty list."""
    return {f"{name}_mean": fmean(values)} if values else {}


def _status(answer: GeneratedAnswer | JudgedAnswer | None) -> Status | None:
    return answer.status if answer else None


def _is_without_evidence(trajectory: Trajectory) -> bool:
    """Return whether an episode scored 0 without a call and was not given up."""
    judged = trajectory.judged
    skipped = judged is not None and judged.status == "skipped" and judged.score == 0
    return skipped and trajectory.end != "declined"
