"""Check images between text ids with tiny random Qwen2.5-VL and Qwen3-VL models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kits.float64 import CLOSE, float64
from tests.kits.trainer.images import (
    IMAGE,
    KINDS,
    NEVER,
    PAD,
    START,
    TOKENIZER,
    noise_patches,
    rollouts,
    tiny,
)
from tests.kits.trainer.runs import letter_tokenizer
from trainer.rl.advantage import pad_rows, token_advantages
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import freeze_vision, load_policy, vision_parts
from trainer.rl.rollout import Rollout, rollout_logprobs
from trainer.rl.update import update_policy


def action_values(rows: list[list[float]], samples: list[Rollout]) -> list[float]:
    """Return the values at the tokens that the policy sampled."""
    values = [value for row in rows for value in row]
    actions = [action for sample in samples for action in sample.actions]
    return [value for value, action in zip(values, actions, strict=True) if action]


@KINDS
@float64()
def test_a_padded_batch_gives_what_each_row_gives_alone_and_the_model_itself(kind: str) -> None:
    model, rows = tiny(kind), rollouts()
    batched = action_values(
        rollout_logprobs(rows, model, 1.0, PAD, 4096, banned_token_ids=NEVER), rows
    )
    single = [
        rollout_logprobs([row], model, 1.0, PAD, 1, banned_token_ids=NEVER)[0] for row in rows
    ]
    # Rotary angles are float32.
    assert batched == pytest.approx(action_values(single, rows), abs=1e-6)
    row = rows[2]
    ids = torch.tensor([row.prompt_input_ids + row.completion_token_ids])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.cat([image_patches.patches for image_patches in row.images]),
            image_grid_thw=torch.tensor([image_patches.grid for image_patches in row.images]),
            mm_token_type_ids=(ids == IMAGE).long(),
        ).logits[0, len(row.prompt_input_ids) - 1 : -1]
    logits[:, NEVER] = -torch.inf
    completion_ids = torch.tensor(row.completion_token_ids)
    expected = logits.log_softmax(-1).gather(-1, completion_ids[:, None])[:, 0].tolist()
    assert action_values([single[2]], [row]) == pytest.approx(
        action_values([expected], [row]), abs=CLOSE
    )
    other = replace(row, images=[noise_patches(4, 4, 99), *row.images[1:]])
    changed = rollout_logprobs([other], model, 1.0, PAD, 1, banned_token_ids=NEVER)
    assert max(abs(a - b) for a, b in zip(changed[0], single[2], strict=True)) > 0.01


@KINDS
@float64()
def test_sampling_goes_on_behind_images_and_the_trainer_agrees(kind: str) -> None:
    model, rows = tiny(kind), rollouts()
    sampler = GenerateSampler(model, TOKENIZER, banned_token_ids=NEVER)
    cfg = SamplingConfig(max_new_tokens=6, temperature=2.0, num_samples_per_prompt=2)
    so_far = [row.prompt_input_ids + row.completion_token_ids for row in rows]
    images = [row.images for row in rows]
    for i, samples in sampler.sample(so_far, cfg, images=images, seed=0):
        for sample in samples:
            assert not set(sample.token_ids) & set(NEVER)
            trainer_logprobs, _, _ = completion_logprobs(
                model,
                [so_far[i]],
                [sample.token_ids],
                2.0,
                PAD,
                images=[images[i]],
                banned_token_ids=NEVER,
            )
            assert sample.logprobs == pytest.approx(trainer_logprobs[0].tolist(), abs=1e-6)


@float64()
def test_an_update_clips_nothing_before_its_first_step_and_moves_what_reads() -> None:
    model, rows = tiny("qwen2_5_vl"), rollouts()
    freeze_vision(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    mask = pad_rows([row.actions for row in rows], torch.bool)
    advantages = token_advantages(
        torch.tensor([1.0, -1.0, 0.5, 2.0]), torch.zeros(mask.shape), mask, [0] * 4
    )
    options = {"algorithm": "gspo", "kl_coef": 0.0, "micro_batch_tokens": 60, "entropy_coef": 0.01}
    stats = update_policy(
        rows,
        advantages,
        torch.optim.SGD([w for w in model.parameters() if w.requires_grad], 0.1),
        RLConfig.model_validate({**options, "ppo_epochs": 1}),
        policy_model=model,
        temperature=1.0,
        pad_id=PAD,
        banned_token_ids=NEVER,
    )
    assert stats.clip_frac == 0 and abs(stats.approx_kl or 0) < CLOSE
    assert stats.grad_norm and stats.entropy
    moved = {n for n, w in model.named_parameters() if not torch.equal(w, before[n])}
    assert moved and not any("visual" in name for name in moved)


def test_ids_and_images_that_do_not_match_are_refused() -> None:
    """Check each row: transformers compares batch totals, where two errors can cancel out."""
    model, (_, one_image, three_images, _) = tiny("qwen2_5_vl"), rollouts()
    longer = [*one_image.prompt_input_ids]
    longer.insert(longer.index(IMAGE), IMAGE)
    shorter = [*three_images.prompt_input_ids]
    shorter.remove(IMAGE)
    faulty = [
        replace(one_image, prompt_input_ids=longer),
        replace(three_images, prompt_input_ids=shorter),
    ]
    with pytest.raises(ValueError, match=r"row 0: runs of image ids \[3\].* are \[2\]"):
        rollout_logprobs(faulty, model, 1.0, PAD, 4096)
    plain = [5 if i == START else i for i in one_image.prompt_input_ids]
    with pytest.raises(ValueError, match=r"row 0: runs of image ids \[-2\]"):
        rollout_logprobs([replace(one_image, prompt_input_ids=plain)], model, 1.0, PAD, 4096)
    with pytest.raises(ValueError, match=r"row 1: runs of image ids \[2\].* are \[\]"):
        rollout_logprobs([one_image, replace(one_image, images=[])], model, 1.0, PAD, 4096)


def test_a_policy_that_sees_is_loaded(tmp_path: Path) -> None:
    tiny("qwen2_5_vl").float().save_pretrained(tmp_path)
    letter_tokenizer().save_pretrained(tmp_path)
    model, _ = load_policy(PolicyConfig(path=str(tmp_path)), torch.device("cpu"))
    learns = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert learns and not any("visual" in name for name in learns)
    assert vision_parts(model) == [model.get_submodule("model.visual")]


def test_greedy_ids_have_no_log_probabilities() -> None:
    sampler = GenerateSampler(tiny("qwen2_5_vl"), TOKENIZER)
    with pytest.raises(ValueError, match="with_logprobs"):
        list(sampler.sample([[5]], SamplingConfig(temperature=0)))
