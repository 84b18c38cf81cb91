"""Check updates of a policy with rounded weights, whose sampler and trainer log-probabilities
differ."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.runs import byte_level_tokenizer, example, save_policy
from trainer.rl.rollout import rollout_logprobs
from trainer.translation.config import TranslationConfig
from trainer.translation.train import train_translation


@pytest.fixture
def first_update(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run one update with its own settings in its own folder, and return its log line."""
    save_policy(tmp_path / "policy", byte_level_tokenizer())
    examples = [example(f"Open file {n}.", str(n)) for n in range(4)]
    with running_service(FakeBackend("metricx")) as url:
        settings = [
            f"policy.path={tmp_path}/policy",
            "policy.lora.r=2",
            "policy.weights_dtype=bfloat16",
            "generation.prompt_template=source",
            "generation.max_new_tokens=12",
            f"reward.metricx_urls={url}",
            "reward.w_xcomet_span=0",
            "rl.num_updates=1",
            "rl.ppo_epochs=1",
            "rl.batch_size=4",
            "misc.device=cpu",
            "misc.threads=1",
        ]

        def run(*overrides: str) -> dict[str, Any]:
            folder = tempfile.mkdtemp(dir=tmp_path)
            cfg = load_config(
                TranslationConfig, None, [*settings, *overrides, f"misc.run_dir={folder}/run"]
            )
            return train_translation(examples, [], cfg).updates[0]

        yield run


def test_weights_in_bfloat16_are_corrected_for_without_being_asked(
    first_update: Callable[..., dict[str, Any]],
) -> None:
    """Check the ratio: it is 1 in one pass over a batch, and without the correction it is not."""
    corrected = first_update("rl.importance_correction=auto")
    plain = first_update("rl.importance_correction=off")
    assert corrected["sampler_gap_mean"] > 0 and plain["sampler_gap_mean"] is None
    assert 0 <= corrected["approx_kl"] < plain["approx_kl"] / 2


def test_gspo_makes_the_old_log_probabilities_once(
    first_update: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the update computes them once; beforehand only if the KL is part of the reward."""
    num_rollouts_by_call = []

    def counted(rollouts: Any, *args: Any, **options: Any) -> Any:
        num_rollouts_by_call.append(len(rollouts))
        return rollout_logprobs(rollouts, *args, **options)

    monkeypatch.setattr("trainer.runs.learner.rollout_logprobs", counted)
    line = first_update("rl.algorithm=gspo", "rl.kl_coef=0")
    assert not num_rollouts_by_call
    assert line["sampler_gap_mean"] > 0 and line["entropy_est"] > 0
    assert line["steps"] == 1 and line["clip_frac"] == 0 and line["approx_kl"] == 0
    assert abs(line["importance_weight_mean"] - 1) < 0.05
    first_update("rl.algorithm=gspo", "rl.kl_coef=0.1", "rl.kl_in=reward")
    assert len(num_rollouts_by_call) == 2  # the reference's and these
    first_update("rl.algorithm=ppo", "rl.kl_coef=0")
    assert len(num_rollouts_by_call) == 3
