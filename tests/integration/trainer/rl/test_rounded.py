"""A policy whose frozen weights are rounded: what the sampler says is not what the trainer says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.kit.servers import running_service
from scorekit.config import load_config
from scorekit.server.fake import FakeBackend
from tests.kits.trainer.runs import byte_level_tokenizer, example, save_policy
from trainer.translation.config import TrainerConfig
from trainer.translation.train import run_toy_rl


def test_weights_in_bfloat16_are_corrected_for_without_being_asked(tmp_path: Path) -> None:
    """With one pass over a batch the ratio is 1; without the correction it is not."""
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

        def first_update(correction: str) -> dict[str, Any]:
            own = [
                f"rl.importance_correction={correction}",
                f"misc.run_dir={tmp_path}/{correction}",
            ]
            cfg = load_config(TrainerConfig, None, [*settings, *own])
            return run_toy_rl(examples, [], cfg).updates[0]

        corrected, plain = first_update("auto"), first_update("off")
    assert corrected["sampler_gap_mean"] > 0 and plain["sampler_gap_mean"] is None
    assert 0 <= corrected["approx_kl"] < plain["approx_kl"] / 2
