"""Check bfloat16 episodes with images: the ratio before the first step is 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.trainer.images import KINDS, PAD, PROCESSOR, tiny
from tests.kits.trainer.searching.episodes import ask, crop, played, search
from tests.kits.trainer.searching.policies import (
    TINY_SIGHT,
    ToldSampler,
    tiny_reader,
    tiny_tokenizer,
    turn_ids,
)
from trainer.rl import rollout, update
from trainer.rl.advantage import pad_rows, token_advantages
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import load_policy
from trainer.rl.rollout import Rollout, rollout_logprobs
from trainer.rl.update import ForwardOptions, accumulate_gradients, update_policy
from trainer.search.rollout.sampled import SampledPolicy

CPU = torch.device("cpu")
#: One group each: with a crop, with two pages, without a page, with one page and a long turn.
TURNS = {
    "a": [search("births"), crop(10, 10, 70, 30)],
    "b": [search("births 1990"), search("rainfall")],
    "c": [search("zebra")],
    "d": [search("rainfall " * 9)],
}
#: Tokens of a micro-batch: at most two episodes, so that a minibatch has one or two.
MICRO_BATCH = 3000


def episodes(reader: Any) -> list[Rollout]:
    """Return two rollouts of each episode, with ids as the episode joins them."""
    tokenizer = tiny_tokenizer()

    def answer(prompt: str) -> str:
        turns = TURNS[prompt.partition("Question ")[2][0]]
        turn = prompt.count("<|im_start|>assistant") - 1
        last = "<think>enough</think>\n<search_complete>true</search_complete>"
        return turns[turn] if turn < len(turns) else last

    ids = turn_ids(tokenizer, reader)
    sampling = SamplingConfig(max_new_tokens=200)
    policy = SampledPolicy(
        ToldSampler(tokenizer, answer), ids, sampling, name="told", context=10**5
    )
    questions = [ask(name, text=f"Question {name}?") for name in TURNS]
    done = played(policy, questions, samples=2, sight=TINY_SIGHT)
    view_kinds = [
        [view.kind for turn in episode.turns for view in turn.views] for episode in done[::2]
    ]
    assert view_kinds == [["page", "crop"], ["page", "page"], [], ["page"]]
    return [
        policy.ended_episodes[episode.trajectory_id].rollout(
            episode.trajectory_id, i // 2, ids.stops
        )
        for i, episode in enumerate(done)
    ]


@KINDS
def test_several_minibatches_with_pictures_begin_at_a_ratio_of_1(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check rounded weights below adapters, with rounding that depends on neighboring sequences.

    Some processors round so: log-probabilities from other batches differ by more than GSPO's
    range, those of the update do not differ until weights change.
    """

    def rounded(model: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        logprobs, entropy, mask = completion_logprobs(model, prompts, *args, **options)
        return logprobs + 1e-3 * len(prompts), entropy, mask

    for module in (rollout, update):
        monkeypatch.setattr(module, "completion_logprobs", rounded)
    tiny(kind).float().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    policy_values = {"path": str(tmp_path), "lora": {"r": 4}, "weights_dtype": "bfloat16"}
    model, _ = load_policy(PolicyConfig.model_validate(policy_values), CPU)
    reader = tiny_reader(model, PROCESSOR)
    rows = episodes(reader)
    mask = pad_rows([row.actions for row in rows], torch.bool)
    advantages = token_advantages(
        torch.tensor([1.0, -1.0] * 4), torch.zeros(mask.shape), mask, [row.group for row in rows]
    )
    minibatch_options = {"minibatches": 3, "ppo_epochs": 2, "micro_batch_tokens": MICRO_BATCH}
    cfg = RLConfig.model_validate({"algorithm": "gspo", "kl_coef": 0.0, **minibatch_options})
    alone = rollout_logprobs(rows, model, 1.0, PAD, 1, banned_token_ids=reader.banned_token_ids)
    for row, values in zip(rows, alone, strict=True):
        row.old_logprobs = values
    passes = ForwardOptions(
        model, cfg, DistributedContext(CPU), pad_id=PAD, banned_token_ids=reader.banned_token_ids
    )
    foreign = accumulate_gradients(rows, advantages, range(len(rows)), passes)
    assert foreign["clip_frac"] > 0

    steps: list[dict[str, float]] = []

    def noted(*arguments: Any) -> dict[str, float]:
        steps.append(accumulate_gradients(*arguments))
        return steps[-1]

    monkeypatch.setattr(update, "accumulate_gradients", noted)
    stats = update_policy(
        rows,
        advantages,
        torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-2),
        cfg,
        policy_model=model,
        temperature=1.0,
        pad_id=PAD,
        banned_token_ids=reader.banned_token_ids,
    )
    assert stats.steps == len(steps) == 6
    assert steps[0]["clip_frac"] == 0 and steps[0]["approx_kl"] == 0
    assert all(step["approx_kl"] != 0 for step in steps[1:])  # after a step
    assert any(step["clip_frac"] > 0 for step in steps[1:])
