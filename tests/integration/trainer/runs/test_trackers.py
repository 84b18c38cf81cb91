"""Test trackers: the stats of a run in TensorBoard's files, and the message for a missing one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from testing.servers import running_service, wait_until
from tests.kits.trainer.runs import byte_level_tokenizer, example, save_policy
from trainer.runs.run_log import read_jsonl
from trainer.runs.trackers import check_trackers, track, tracking
from trainer.translation.config import TranslationConfig
from trainer.translation.train import train_translation


def events(folder: Path):
    """Return what TensorBoard reads in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TranslationConfig:
    monkeypatch.delenv("XCOMET_URL", raising=False)
    policy = save_policy(tmp_path / "policy", byte_level_tokenizer())
    return TranslationConfig.model_validate(
        {
            "policy": {"path": str(policy)},
            "generation": {
                "prompt_template": "source",
                "max_new_tokens": 4,
                "num_samples_per_prompt": 2,
            },
            "reward": {"metricx_urls": ["http://127.0.0.1:9"], "w_xcomet_span": 0},
            "rl": {"num_updates": 2, "batch_size": 2, "lr": 1e-3},
            "misc": {
                "device": "cpu",
                "run_dir": str(tmp_path / "run"),
                "trackers": ["tensorboard"],
            },
        }
    )


def test_tensorboard_has_the_numbers_of_the_log(cfg: TranslationConfig) -> None:
    """Check the stats of updates, those of evaluations under eval/, and the config as
    hyperparameters."""
    with running_service(FakeBackend("metricx")) as url:
        cfg.reward.metricx_urls = [url]
        examples = [example(f"Save {n}.", str(n), "저장") for n in range(3)]
        artifacts = train_translation(examples, examples[:1], cfg)
    folder = artifacts.run_dir / "trackers/scorekit"
    event_data = events(folder)
    for line in read_jsonl(artifacts.run_dir / "log.jsonl"):
        for key in ("metricx_score_mean", "grad_norm", "reward_s", "A_norm_std"):
            values = {e.step: e.value for e in event_data.Scalars(f"train/{key}")}
            assert values[line["update"]] == pytest.approx(line[key], rel=1e-6), key
    held_out = {e.step: e.value for e in event_data.Scalars("eval/chrf")}
    assert held_out == {
        line["update"]: pytest.approx(line["chrf"], rel=1e-6)
        for line in read_jsonl(artifacts.run_dir / "eval.jsonl")
    }
    # Never requested: null, not 0.
    assert "train/xcomet_score_mean" not in event_data.Tags()["scalars"]
    (stored,) = folder.glob("*/hparams.yml")
    assert "rl.lr: 0.001" in stored.read_text(encoding="utf-8")


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
    line = {
        "loss": math.nan,
        "kl": math.inf,
        "text": "a",
        "none": None,
        "skipped": True,
        "pairs": {"en>ko": {"chrf": 1.5}},
    }
    with tracking(accelerator, {"rl": {"lr": None, "urls": ["a"]}}):
        track(accelerator, "train", line, 1)
    tags = events(tmp_path / "scorekit").Tags()["scalars"]
    assert sorted(tags) == ["train/pairs.en>ko.chrf", "train/skipped"]


def test_a_run_that_goes_on_replaces_what_was_told_of_later_updates(tmp_path: Path) -> None:
    for done, value in ((None, 1.0), (2, 5.0)):
        # TensorBoard orders files by the second in their names, then by a number as text.
        second = int(time.time())
        wait_until(lambda second=second: int(time.time()) > second)
        accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
        with tracking(accelerator, {}, done):
            for update in range((done or 0) + 1, 5):
                track(accelerator, "train", {"loss": value}, update)
    losses = [(e.step, e.value) for e in events(tmp_path / "scorekit").Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 5.0), (4, 5.0)]


class FailingTracker(GeneralTracker):
    """A tracker whose server is away from its second call on, and that works before."""

    name, requires_logging_directory = "failing", False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[int | None] = []

    @property
    def tracker(self) -> None:
        """Return no run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Take the config."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Fail after the first line."""
        if self.logged:
            raise OSError(28, "No space left on device")
        self.logged.append(step)

    def finish(self) -> None:
        """Fail, as what is left cannot be written."""
        raise ConnectionError("the server is away")


def test_a_tracker_that_fails_does_not_decide_about_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingTracker()
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", failing], project_dir=tmp_path)
    with tracking(accelerator, {}):
        for update in (1, 2, 3):
            track(accelerator, "train", {"loss": float(update)}, update)
    assert failing.logged == [1]
    losses = [(e.step, e.value) for e in events(tmp_path / "scorekit").Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0)]  # of the other tracker, closed at the end
    assert [record.getMessage() for record in caplog.records] == [
        "misc.trackers: failing: OSError: [Errno 28] No space left on device; the run goes on",
        "misc.trackers: failing failed 3 times: it lacks numbers",
    ]


def test_a_tracker_that_does_not_open_is_told_before_the_first_update(tmp_path: Path) -> None:
    (tmp_path / "scorekit").write_text("no folder")
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
    with (
        pytest.raises(UserError, match=r"misc\.trackers: not opened \(.*scorekit"),
        tracking(accelerator, {}),
    ):
        pytest.fail("the run began")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", r"'tensorbord' is unknown\. Choose from: .*tensorboard"),
        ("wandb", r"wandb is not installed\. Run pip install wandb"),
    ],
)
def test_a_tracker_that_is_not_there_is_told_before_weights_load(
    cfg: TranslationConfig, name: str, message: str
) -> None:
    cfg.misc.trackers, cfg.policy.path = [name], "gone"
    with pytest.raises(UserError, match=f"misc.trackers: {message}"):
        train_translation([example("Save.")], [], cfg)


def test_no_tracker_needs_nothing() -> None:
    check_trackers([])
    accelerator = Accelerator(cpu=True)
    with tracking(accelerator, {}):
        track(accelerator, "train", {"loss": 1.0}, 1)
