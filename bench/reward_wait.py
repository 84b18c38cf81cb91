"""Measure how long a training step waits for rewards when each service answers in 2 s.

The demo policy samples 32 prompts x 8 samples x at most 48 tokens. MetricX and xCOMET are fakes
over HTTP, which answer every request after 2 s, however many arrive at once. Three ways are
compared. The trainer's: a group is sent to both services as soon as it is generated. The second:
all samples are sent to both services after generation. The third: they are sent to one service
after the other, as TRL calls reward functions. In all three, the forward passes of the reference
are between generation and the wait.

    python -m bench.reward_wait [--quick]
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from bench.common import ROOT, WORK, Measurement, quiet_logs, run
from scorekit.config import load_config
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app, wait_ready
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_examples
from trainer.translation.rewards.reward_batch import Scores, ServiceName
from trainer.translation.rewards.services import RewardClient

ANSWER_S = 2.0
PARTS = ("rollout_s", "logprob_s", "reward_s", "update_s")


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    quiet_logs()
    prompts, samples, tokens, repeats = (4, 2, 16, 1) if quick else (32, 8, 48, 3)
    with _service("metricx") as metricx, _service("xcomet") as xcomet:
        cfg = load_config(
            TranslationConfig,
            None,
            [
                f"policy.path={ROOT / 'demo/models/policy'}",
                f"misc.run_dir={WORK / 'reward_wait'}",
                f"generation.num_samples_per_prompt={samples}",
                f"generation.max_new_tokens={tokens}",
                f"rl.batch_size={prompts}",
                "rl.num_updates=100",
                "misc.device=cpu",
                f"reward.metricx_urls={metricx}",
                f"reward.xcomet_urls={xcomet}",
                "misc.overwrite=true",
                "misc.caching=false",
            ],
        )
        runs_by_way = _measure(cfg, repeats)
    overlapped, at_once, in_turn = (_median(runs_by_way[name]) for name in WAYS)
    details = {name: runs_by_way[name] for name in WAYS}
    yield Measurement(
        "step's wait for rewards, one service after the other", in_turn["reward_s"], "s"
    )
    yield Measurement(
        "step's wait for rewards, both services after generation", at_once["reward_s"], "s"
    )
    yield Measurement(
        "step's wait for rewards, overlap", overlapped["reward_s"], "s", details=details
    )
    yield Measurement(
        "  share of one service after the other",
        overlapped["reward_s"] / in_turn["reward_s"],
        "",
        at_most=0.5,
    )
    yield Measurement(
        "  share of both after generation", overlapped["reward_s"] / at_once["reward_s"], ""
    )
    for name, parts in zip(WAYS, (overlapped, at_once, in_turn), strict=True):
        total_s = sum(parts.values())
        yield Measurement(
            f"  share of the step that waits, {name}",
            100 * parts["reward_s"] / total_s,
            "%",
            details=parts,
        )


def _measure(cfg: TranslationConfig, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of each step's parts, the ways in turn; each first step is left out."""
    from trainer.runs.open import start_run
    from trainer.translation.evaluation.evaluate import read_reports
    from trainer.translation.train import open_trainer, workload_of

    examples = load_examples(str(ROOT / "demo/data/rl_prompts.jsonl"), limit=512)
    runs_by_way: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with (
        closing(RewardClient(cfg.reward, caching=False)) as rewarder,
        start_run(cfg, read_reports, workload_of(cfg)) as start,
    ):
        loop = open_trainer(start, rewarder, examples, {})
        task: Any = loop.task
        update = 0
        for turn in range(repeats + 1):
            for name, way in WAYS.items():
                update += 1
                reward_client: Any = rewarder if way is None else Afterwards(rewarder, way)
                task.collector.rewarder = reward_client
                line = loop.step(update)
                assert line is not None
                assert line["reward_coverage"] > 0.5, "a service failed"
                if turn:
                    runs_by_way[name].append({part: line[part] for part in PARTS})
    shutil.rmtree(WORK / "reward_wait", ignore_errors=True)
    return runs_by_way


#: Samples by their fields.
Texts = list[Any]


class Afterwards:
    """Replaces a RewardClient. It collects the groups of a batch.

    When the first score is needed, `way` requests all scores.
    """

    def __init__(
        self, rewarder: RewardClient, way: Callable[[RewardClient, Texts], Scores]
    ) -> None:
        self.rewarder, self.way = rewarder, way

    def batch(self, should_stop: Callable[[], bool]) -> Any:
        """Return a batch that only collects.

        should_stop: not used in a measurement.
        """
        return Collected(self)


class Collected:
    """A batch that requests no scores before all its groups are submitted."""

    was_stopped = False

    def __init__(self, after: Afterwards) -> None:
        self.after = after
        self.texts: Texts = []
        self.scores: Scores | None = None

    def submit(self, texts: Texts) -> Part:
        """Keep a group."""
        self.texts += texts
        return Part(self, len(self.texts) - len(texts), len(self.texts))


class Part:
    """The position of a group in its batch."""

    def __init__(self, batch: Collected, start: int, end: int) -> None:
        self.batch, self.index_range = batch, slice(start, end)

    def result(self) -> Scores:
        """Return the group's scores. The first call requests all of them."""
        batch = self.batch
        if batch.scores is None:
            batch.scores = batch.after.way(batch.after.rewarder, batch.texts)
        return Scores(
            {name: values[self.index_range] for name, values in batch.scores.results.items()}
        )


def _both(rewarder: RewardClient, texts: Texts) -> Scores:
    return rewarder.batch().submit(texts).result()


def _in_turn(rewarder: RewardClient, texts: Texts) -> Scores:
    results: dict[ServiceName, Any] = {}
    for name in rewarder.needed:
        results |= rewarder.batch([name]).submit(texts).result().results
    return Scores(results)


WAYS: dict[str, Callable[[RewardClient, Texts], Scores] | None] = {
    "overlap": None,
    "both after generation": _both,
    "one after the other": _in_turn,
}


@contextmanager
def _service(name: Any) -> Iterator[str]:
    """Serve a fake service that answers each scoring request ANSWER_S later."""
    app = create_app(FakeBackend(name), ServiceSettings(cache="memory"))

    async def late(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/score":
            await asyncio.sleep(ANSWER_S)
        await app(scope, receive, send)

    with running_app(late) as url:
        wait_ready(url)
        yield url


def _median(steps: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(step[part] for step in steps) for part in PARTS}


if __name__ == "__main__":
    run("reward_wait", __doc__, questions)
