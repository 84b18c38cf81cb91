"""Check a batch's groups: early scoring, and one deadline for a service that is down."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scorekit.config import load_config
from scorekit.scorers import RewardOutput, SampleForScoring
from scorekit.server.fake import FakeBackend
from testing.servers import PATIENCE_S, Held, running_service, wait_until
from tests.kits.trainer.rewards import Recorder, switched_service
from tests.kits.trainer.runs import byte_level_tokenizer, example, save_policy
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import RewardFailure, SampleGroup
from trainer.translation.rewards.services import RewardClient
from trainer.translation.train import Artifacts, train_translation


def only_metricx(url: str, **changes: Any) -> RewardConfig:
    return RewardConfig(**({"metricx_urls": [url], "w_xcomet_span": 0} | changes))


def pairs(group: int, count: int = 2) -> list[tuple[str, str]]:
    return [(f"source {group}", f"번역 {group} {n}") for n in range(count)]


def outcomes(groups: list[SampleGroup]) -> list[list[bool]]:
    return [[r.ok for r in group.result().results["metricx"]] for group in groups]


def test_a_group_is_scored_before_the_next_one_is_submitted() -> None:
    backend = Recorder("metricx")
    with running_service(backend) as url, closing(RewardClient(only_metricx(url))) as rewarder:
        batch = rewarder.batch()
        groups = []
        for n in range(3):
            groups.append(batch.submit(pairs(n)))
            wait_until(lambda n=n: f"source {n}" in [s.src for s in backend.samples])
        results = [group.result().results["metricx"] for group in groups]
        repeated = rewarder.score([pair for n in range(3) for pair in pairs(n)]).results["metricx"]
    assert [r.score for group in results for r in group] == [r.score for r in repeated]


class WaitingScorer(FakeBackend):
    """A scorer that answers after the other service has received a request, too."""

    barrier = threading.Barrier(2)

    def forward(self, batch: Any) -> Any:
        if "번역" in batch[0].payload.mt:
            self.barrier.wait(PATIENCE_S)
        return super().forward(batch)


def test_both_services_are_asked_at_once() -> None:
    with (
        running_service(WaitingScorer("metricx")) as m,
        running_service(WaitingScorer("xcomet")) as x,
    ):
        cfg = RewardConfig(metricx_urls=[m], xcomet_urls=[x])
        with closing(RewardClient(cfg)) as rewarder:
            scores = rewarder.score(pairs(0))
    assert all(r.ok for name in ("metricx", "xcomet") for r in scores.results[name])


def test_a_dead_service_costs_a_batch_one_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """Check that only the groups in flight when it is given up have been waited for, of 64."""
    with running_service(FakeBackend("metricx")) as url:
        rewarder = RewardClient(only_metricx(url, deadline_s=3))
    with closing(rewarder):
        batch = rewarder.batch()
        groups = [batch.submit(pairs(n)) for n in range(64)]
        results = [r for group in groups for r in group.result().results["metricx"]]
    assert {r.error.type for r in results} == {"upstream"}  # type: ignore[union-attr]
    is_skipped = ["skipped for this batch" in r.error.message for r in results]  # type: ignore[union-attr]
    assert sum(is_skipped) >= 2 * (64 - 16)  # 8 at once, and on a busy machine a few more
    assert caplog.text.count("metricx is skipped for this batch") == 1


def test_a_service_that_dies_after_an_answer_is_given_up_too() -> None:
    """Check that all groups are submitted before that answer, as in an evaluation."""
    with (
        switched_service() as (switch, url),
        closing(RewardClient(only_metricx(url, deadline_s=6))) as rewarder,
    ):
        switch.down = lambda body: '"source 0"' not in body
        batch = rewarder.batch()
        groups = [batch.submit(pairs(n)) for n in range(64)]
        results = [group.result().results["metricx"] for group in groups]
    assert [r.ok for r in results[0]] == [True, True]
    is_skipped = [
        not r.ok and "skipped for this batch" in r.error.message
        for of_group in results
        for r in of_group
    ]
    assert sum(is_skipped) >= 2 * (64 - 32)  # two rounds of 8 at once, and some that followed


@pytest.mark.usefixtures("no_second_try")
def test_the_next_batch_asks_again() -> None:
    with switched_service() as (switch, url), closing(RewardClient(only_metricx(url))) as rewarder:
        switch.down = lambda body: True
        batch = rewarder.batch()
        assert outcomes([batch.submit(pairs(n)) for n in range(3)]) == [[False] * 2] * 3
        switch.down = lambda body: False
        batch = rewarder.batch()
        assert outcomes([batch.submit(pairs(n)) for n in range(3)]) == [[True] * 2] * 3


@pytest.mark.usefixtures("no_second_try")
def test_a_service_that_answers_others_is_not_given_up() -> None:
    with switched_service() as (switch, url), closing(RewardClient(only_metricx(url))) as rewarder:
        switch.down = lambda body: "source 0" in body
        batch = rewarder.batch()
        first = batch.submit(pairs(0))
        wait_until(lambda: switch.refused)
        answered = batch.submit(pairs(1))
        wait_until(lambda: answered.futures["metricx"].done())
        assert outcomes([first]) == [[False] * 2]
        assert outcomes([answered, batch.submit(pairs(2))]) == [[True] * 2] * 2


@pytest.mark.usefixtures("no_second_try")
def test_what_was_scored_before_a_service_died_is_kept() -> None:
    with switched_service() as (switch, url), closing(RewardClient(only_metricx(url))) as rewarder:
        batch = rewarder.batch()
        early = batch.submit(pairs(0))
        wait_until(lambda: early.futures["metricx"].done())
        switch.down = lambda body: True
        assert outcomes([batch.submit(pairs(1)), early]) == [[False] * 2, [True] * 2]


def test_a_slow_service_is_waited_for_until_the_deadline() -> None:
    slow = Held("metricx")
    with running_service(slow) as url:
        with closing(RewardClient(only_metricx(url, timeout_s=0.2, deadline_s=0.4))) as rewarder:
            slow.hold()
            batch = rewarder.batch()
            success_by_group = outcomes([batch.submit(pairs(n)) for n in range(12)])
            slow.go.set()
    assert success_by_group == [[False] * 2] * 12


@pytest.mark.usefixtures("no_second_try")
def test_on_failure_fail_is_raised_by_the_group() -> None:
    with running_service(FakeBackend("metricx")) as url:
        rewarder = RewardClient(only_metricx(url, on_failure="fail"))
    with closing(rewarder):
        group = rewarder.batch().submit(pairs(0))
        with pytest.raises(RewardFailure, match="metricx: upstream"):
            group.result()


class OneAtATime:
    """A scorer in this process for one caller at a time; it records the order of its samples."""

    sources: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.free = threading.Lock()

    def score_batch(self, samples: list[SampleForScoring], cfg: Any = None) -> RewardOutput:
        assert self.free.acquire(blocking=False)
        self.sources.append(samples[0].src)
        threading.Event().wait(0.01)
        self.free.release()
        return RewardOutput([None] * len(samples), [])


def test_a_scorer_in_this_process_is_asked_one_group_after_another() -> None:
    OneAtATime.sources.clear()
    with closing(RewardClient(only_metricx(f"{__name__}:OneAtATime"))) as rewarder:
        batch = rewarder.batch()
        for group in [batch.submit(pairs(n)) for n in range(8)]:
            with pytest.raises(Exception, match="returned 0 results for 2 samples"):
                group.result()
    assert OneAtATime.sources == [f"source {n}" for n in range(8)]


def small_run(
    folder: Path, url: str, name: str, *, resume: bool = False, **rules: int
) -> Artifacts:
    """Run four updates on a tiny policy."""
    if not (folder / "policy").exists():
        save_policy(folder / "policy", byte_level_tokenizer())
    cfg = load_config(
        TranslationConfig,
        None,
        [
            f"policy.path={folder / 'policy'}",
            f"misc.run_dir={folder / name}",
            "misc.device=cpu",
            "misc.threads=1",
            "generation.prompt_template=source",
            "generation.max_new_tokens=4",
            "generation.num_samples_per_prompt=2",
            "rl.batch_size=4",
            "rl.num_updates=4",
            "rl.lr=0.01",
            "reward.w_xcomet_span=0",
            f"reward.metricx_urls={url}",
            "misc.save_every_n_updates=0",
            *(f"stop.{key}={value}" for key, value in rules.items()),
        ],
    )
    examples = [example(f"Open {n}.", str(n)) for n in range(8)]
    return train_translation(examples, [], cfg, resume=resume)


def without_seconds(run: Artifacts) -> list[dict[str, Any]]:
    left_out = ("attempts", "rollout_s", "logprob_s", "reward_s", "update_s")
    return [{k: v for k, v in line.items() if k not in left_out} for line in run.updates]


@pytest.mark.usefixtures("no_second_try")
def test_a_dead_service_uses_up_no_prompts_and_ends_the_run(tmp_path: Path) -> None:
    """Check the end of the run and that it resumes.

    It ends with the last update's checkpoint, an exit code, and a log line. When the service is
    back, the run continues as if the service had not been down."""
    with switched_service() as (switch, url):
        full_run = small_run(tmp_path, url, "whole")
        log = tmp_path / "run/log.jsonl"
        switch.down = lambda body: log.exists() and log.read_text().count("\n") == 2
        stopped_run = small_run(tmp_path, url, "run", skipped_updates=2)
        assert stopped_run.exit_code == 3 and len(stopped_run.updates) == 2
        assert stopped_run.checkpoint is not None and stopped_run.checkpoint.name == "step-000002"
        assert "update 3 has no rewards: no sample was scored in 2 attempts" in str(
            stopped_run.stopped
        )
        log_text = (tmp_path / "run/messages.log").read_text()
        assert "update 3 waits for rewards: attempt 1 of 2 gave no score" in log_text
        assert "the run ends: update 3 has no rewards" in log_text
        switch.down = lambda body: False
        artifacts = small_run(tmp_path, url, "run", resume=True)
    assert artifacts.exit_code == 0 and artifacts.stopped is None
    assert without_seconds(artifacts) == without_seconds(full_run)
    uninterrupted, resumed = (
        folder / "checkpoints/step-000004" for folder in (full_run.run_dir, artifacts.run_dir)
    )
    assert (uninterrupted / "model.safetensors").read_bytes() == (
        resumed / "model.safetensors"
    ).read_bytes()


@pytest.mark.usefixtures("no_second_try")
def test_a_service_that_comes_back_is_asked_for_the_same_samples(tmp_path: Path) -> None:
    with switched_service() as (switch, url):
        full_run = small_run(tmp_path, url, "whole")
        log, messages = tmp_path / "run/log.jsonl", tmp_path / "run/messages.log"
        switch.down = lambda body: (  # until the failure was reported
            log.exists()
            and log.read_text().count("\n") == 1
            and "attempt 1" not in messages.read_text()
        )
        artifacts = small_run(tmp_path, url, "run", skipped_updates=9)
    assert [line["attempts"] for line in artifacts.updates] == [1, 2, 1, 1]
    assert without_seconds(artifacts) == without_seconds(full_run)


@pytest.mark.usefixtures("no_second_try")
def test_a_run_without_any_reward_ends_before_its_first_update(tmp_path: Path) -> None:
    with switched_service() as (switch, url):
        switch.down = lambda body: '"mt"' in body
        stopped_run = small_run(tmp_path, url, "run", skipped_updates=1)
    assert (
        stopped_run.exit_code == 3 and stopped_run.checkpoint is None and stopped_run.updates == []
    )
