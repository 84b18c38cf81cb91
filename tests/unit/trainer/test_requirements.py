"""Check each requirement of the trainer with the real functions.

The integration test is in tests/integration/trainer/runs/test_run.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from scorekit.schemas import ErrorSpan, TranslationSample
from services.metricx.model import format_input
from tests.kits.trainer.runs import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    letter_tokenizer,
    rollout,
    tiny_llama,
)
from trainer.rl.config import RLConfig
from trainer.rl.rollout import rollout_logprobs
from trainer.rl.update import update_policy
from trainer.translation.offsets import compute_token_char_offsets
from trainer.translation.rewards import metricx_reward
from trainer.translation.rewards.credit import spans_to_token_rewards
from trainer.translation.rewards.sample_reward import SampleReward, rollout_advantages

TEXT = "파일을 열고 저장하십시오. 🙂"


def test_metricx_input_format() -> None:
    sample = TranslationSample(src="Open the file.", mt="파일을 여십시오.")
    assert format_input(sample) == "source: Open the file. candidate: 파일을 여십시오."


def test_metricx_reward_transform() -> None:
    assert [metricx_reward(score) for score in (0.0, 1.75, 5.0, 25.0)] == [5.0, 3.25, 0.0, -20.0]
    assert metricx_reward(1.75, offset=10.0) == 8.25


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_token_char_offsets_rebuild_the_text(make: object) -> None:
    """Check characters of several tokens too; the tokens share one range."""
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    offsets = compute_token_char_offsets(tokenizer, ids)
    assert len(offsets) == len(ids)
    rebuilt, covered = "", 0
    for start, end in offsets:
        rebuilt += TEXT[max(start, covered) : end]
        covered = max(covered, end)
    assert rebuilt == TEXT
    assert offsets[-1] == (len(TEXT), len(TEXT))


def test_spans_to_token_rewards_hits_only_the_span() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    offsets = compute_token_char_offsets(tokenizer, ids)
    start = TEXT.index("저장")
    marked = ErrorSpan(start=start, end=start + 2, severity="MAJOR", confidence=0.9, text="저장")
    weights = {"MINOR": -1.0, "MAJOR": -5.0, "CRITICAL": -10.0}
    token_rewards = spans_to_token_rewards(TEXT, offsets, [marked], weights, "any_overlap")
    assert len(token_rewards) == len(ids)
    hit = [first < start + 2 and last > start for first, last in offsets]
    assert any(hit) and not all(hit)
    assert token_rewards == [-5.0 if inside else 0.0 for inside in hit]


def test_advantage_combination_and_normalisation() -> None:
    """Check A_raw = r_seq on every token + token rewards, and that A_norm has mean 0 and
    deviation 1 over the valid tokens."""
    rollouts = [rollout([1], [2] * n) for n in (3, 1, 2)]
    rewards = [
        SampleReward(2.0, [0.0, -5.0, 0.0], [True, True, True]),
        SampleReward(-1.0, [0.0], [True]),
        SampleReward(0.5, [-1.0, -1e9], [True, False]),
    ]
    advantages = rollout_advantages(rollouts, rewards, RLConfig())
    assert advantages.mask.tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert advantages.raw[advantages.mask].tolist() == [2.0, -3.0, 2.0, -1.0, -0.5]
    values = advantages.values[advantages.mask]
    assert values.mean().item() == pytest.approx(0, abs=1e-9)
    assert values.std(correction=0).item() == pytest.approx(1, abs=1e-7)
    assert not advantages.values[~advantages.mask].any()


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
def test_ppo_and_reinforce_update_without_nan(algorithm: str) -> None:
    model = tiny_llama(letter_tokenizer())
    rollouts = [rollout([3, 4, 2], [5, 6, 1]), rollout([4, 2], [7, 1], group=1)]
    rows = rollout_logprobs(rollouts, model, 1.0, 0, 4096)
    for sampled, row in zip(rollouts, rows, strict=True):
        sampled.old_logprobs, sampled.ref_logprobs = row, row
    rewards = [
        SampleReward(1.0, [0.0, -5.0, 0.0], [True] * 3),
        SampleReward(-2.0, [0, 0], [True] * 2),
    ]
    cfg = RLConfig(algorithm=algorithm, entropy_coef=0.01)  # type: ignore[arg-type]
    before = [p.clone() for p in model.parameters()]
    stats = update_policy(
        rollouts,
        rollout_advantages(rollouts, rewards, cfg),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        cfg,
        policy_model=model,
        temperature=1.0,
        pad_id=0,
    )
    assert stats.steps == (1 if algorithm == "reinforce" else 2)
    values = (stats.policy_loss, stats.approx_kl, stats.kl_ref, stats.entropy, stats.grad_norm)
    assert all(value is not None and math.isfinite(value) for value in values)
    assert all(p.isfinite().all() for p in model.parameters())
    assert any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_required_and_earlier_names_remain() -> None:
    from scorekit.errors import AnswerLost, ResponseLost
    from trainer.translation.config import TrainerConfig, TranslationConfig
    from trainer.translation.train import run_toy_rl, train_translation

    assert run_toy_rl is train_translation
    assert (TrainerConfig, AnswerLost) == (TranslationConfig, ResponseLost)
