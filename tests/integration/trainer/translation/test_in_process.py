"""Test scorers in the trainer's own process: arguments, cache and errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from scorekit.errors import UserError
from scorekit.schemas import score_result
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output
from tests.kits.metricx_checkpoints import FLOAT32
from trainer.translation.config import MiscConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.services import RewardClient

DEMO = Path(__file__).parents[4] / "demo" / "models"
METRICX = "services.metricx.model:MetricXQEScorer"


class Counting:
    """A scorer by length that records its arguments and samples; `bad` fails."""

    instances: ClassVar[list[dict[str, Any]]] = []
    translations: ClassVar[list[str]] = []

    def __init__(
        self, metricx_model_name: str = "own", device: str = "none", threads: int = 0, step: int = 1
    ) -> None:
        type(self).instances.append(
            {"model": metricx_model_name, "device": device, "threads": threads, "step": step}
        )

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        type(self).translations.extend(sample.mt for sample in samples)
        return reward_output([score_result.validate_python(_result(s.mt)) for s in samples])


def _result(mt: str) -> dict[str, Any]:
    if mt == "bad":
        error = {"type": "model_failure", "message": "no", "retryable": False}
        return {"id": None, "ok": False, "error": error}
    truncated = {"src": False, "mt": False}
    return {
        "id": None,
        "ok": True,
        "score": float(len(mt)),
        "tokens": 1,
        "truncated": truncated,
        "mt_covered": len(mt),
        "cached": False,
    }


class NoScorer:
    pass


def opened(target: str, misc: MiscConfig | None = None, **changes: Any) -> RewardClient:
    values: dict[str, Any] = {"metricx_urls": [target], "w_xcomet_span": 0} | changes
    return RewardClient(RewardConfig(**values), misc=misc)


def test_a_scorer_gets_what_the_config_says_and_it_takes() -> None:
    def open_scorer(**changes: Any) -> dict[str, Any]:
        misc = MiscConfig(device="cpu", threads=3)
        opened(f"{__name__}:Counting", misc, **changes).close()
        return Counting.instances[-1]

    assert open_scorer() == {"model": "own", "device": "cpu", "threads": 3, "step": 1}
    named = open_scorer(metricx_model_name="m", metricx_scorer_args={"device": "cuda", "step": 2})
    assert named == {"model": "m", "device": "cuda", "threads": 3, "step": 2}
    opened(f"{__name__}:Counting", MiscConfig()).close()
    assert Counting.instances[-1]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        (METRICX, {}, "missing a required argument: 'metricx_model_name'; its arguments: metricx"),
        (METRICX, {"metricx_model_name": "m", "batch": 8}, "unexpected keyword argument 'batch'"),
        (METRICX, {"metricx_model_name": "m", "dtype": "fp32"}, "fp32: give float32, bfloat16"),
        (f"{__name__}:NoScorer", {}, r"is no scorer: it has no score_batch"),
        (f"{__name__}:DEMO", {}, "is no class"),
    ],
)
def test_what_is_wrong_is_one_line(target: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        opened(target, metricx_scorer_args=arguments)
    assert "\n" not in str(error.value)


def test_equal_samples_are_scored_once() -> None:
    rewarder = opened(f"{__name__}:Counting")
    Counting.translations.clear()
    texts = [("a", "집"), ("a", "집"), ("b", "집"), ("a", "bad")]
    first = rewarder.score(texts).results["metricx"]
    repeated = rewarder.score([*texts, ("a", "새로")]).results["metricx"]
    assert Counting.translations == ["집", "집", "bad", "bad", "새로"]  # a failure is not cached
    assert [result.ok for result in repeated] == [True, True, True, False, True]
    assert [getattr(result, "score", None) for result in repeated] == [1, 1, 1, None, 2]
    assert [getattr(result, "cached", None) for result in repeated] == [True] * 3 + [None, False]
    assert [getattr(result, "cached", None) for result in first] == [False] * 3 + [None]
    rewarder.close()


def test_without_caching_every_sample_is_scored() -> None:
    cfg = RewardConfig(metricx_urls=[f"{__name__}:Counting"], w_xcomet_span=0)
    rewarder = RewardClient(cfg, caching=False)
    Counting.translations.clear()
    for _ in range(2):
        rewarder.score([("a", "집"), ("a", "집")])
    assert Counting.translations == ["집"] * 4
    rewarder.close()


def test_a_real_model_by_its_name_in_the_config() -> None:
    """Check that it scores as a service would, and that torch's thread count is unchanged."""
    from services.metricx.model import MetricXQEScorer

    before = torch.get_num_threads()
    folder = str(DEMO / "metricx")
    direct = MetricXQEScorer(folder, device="cpu", threads=before)
    pairs = [("Open the file.", "파일을 여십시오."), ("Save it.", "저장")]
    expected_scores = direct.score_batch(
        [SampleForScoring(*pair) for pair in pairs]
    ).sequence_scores
    rewarder = opened(
        METRICX,
        MiscConfig(device="cpu"),
        metricx_model_name=folder,
        metricx_scorer_args={"max_batch_tokens": 64},
    )
    results = rewarder.score(pairs).results["metricx"]
    rewarder.close()
    assert [getattr(result, "score", None) for result in results] == pytest.approx(
        expected_scores, abs=FLOAT32
    )
    assert torch.get_num_threads() == before


class Short(Counting):
    """Does not say how much it reads."""

    description = SimpleNamespace(model="m", tokenizer="m", inputs={}, higher_is_better=False)


def test_a_scorer_whose_description_is_incomplete_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(AttributeError, match="max_input_length"):
        opened(f"{__name__}:Short", max_input_length=16, metricx_model_name=None)
    assert set(threading.enumerate()) <= before
