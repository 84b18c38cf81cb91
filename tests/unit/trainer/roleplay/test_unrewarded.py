"""Check statistics that are not part of the reward."""

from __future__ import annotations

import pytest
import torch

from tests.kits.trainer.roleplay import write_policy
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import load_policy
from trainer.roleplay.evaluation.diagnostics import copied_share, distinct, repeated_share
from trainer.roleplay.evaluation.evaluate import kl_to_start
from trainer.roleplay.evaluation.stats import compute_stats, table

CPU = torch.device("cpu")


def test_what_is_copied_is_a_share_of_characters_in_long_stretches():
    assert copied_share("비 오는 날에는 집에 있자.", "비 오는 날에는 집에 있자.") == 1.0
    assert copied_share("아무것도 같지 않은 문장", "비 오는 날에는 집에 있자.") == 0.0
    assert copied_share("abcdefgh1234", "xx abcdefgh yy") == pytest.approx(8 / 12)
    assert copied_share("abcdefg", "abcdefg") == 0.0  # shorter than a copied stretch
    assert copied_share("a  b\nc d e f g", "a b c d e f g") == 1.0  # white space is one space
    assert copied_share("", "something") is None and copied_share("something", None) is None


def test_what_is_said_again():
    assert repeated_share("12345678" * 3) == pytest.approx(1 - 8 / 17)
    assert repeated_share("하나 둘 셋 넷 다섯 여섯 일곱") == 0.0
    assert repeated_share("짧다") == 0.0
    assert repeated_share(" \n") is None


def test_distinct_replies():
    assert distinct(["가", "가", " 가 ", "나"]) == 0.5
    assert distinct([]) is None


def kl_by_hand(model, start, prompt, completion):
    ids = torch.tensor([[*prompt, *completion]])
    total = 0.0
    with torch.no_grad():
        now, then = (m(input_ids=ids).logits[0].log_softmax(-1) for m in (model, start))
    for position in range(len(prompt) - 1, len(prompt) + len(completion) - 1):
        total += float((now[position].exp() * (now[position] - then[position])).sum())
    return total / len(completion)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_kl_to_the_start_is_the_sum_over_the_vocabulary(tmp_path, rank):
    policy = PolicyConfig(path=str(write_policy(tmp_path / "p")), lora=LoraConfig(r=rank))
    model, _ = load_policy(policy, CPU)
    start, _ = load_policy(policy.model_copy(update={"lora": LoraConfig()}), CPU)
    prompts, replies = [[1, 40, 50], [1, 60]], [[70, 80, 2], []]
    unchanged = kl_to_start(model, policy, CPU, prompts, replies)
    assert unchanged[0] == pytest.approx(0, abs=1e-6)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    divergences = kl_to_start(model, policy, CPU, prompts, replies)
    assert divergences[1] is None  # an empty reply
    assert divergences[0] == pytest.approx(
        kl_by_hand(model, start, prompts[0], replies[0]), rel=1e-4
    )
    assert divergences[0] > 0.001


def line(**changes):
    fields = {
        "reward": 0.5,
        "rewards": {
            "reward_format": 1.0,
            "reward_role_split": 1.0,
            "reward_grounded_to_user": 0.0,
            "reward_character_consistency": 0.5,
            "reward_reference_alignment": 0.0,
        },
        "components": {"format/quote": 1.0},
        "tokens": 10,
        "finish_reason": "eos",
        "completion": "가",
        "characters": 1,
        "chrf": 20.0,
        "copied_user": 0.0,
        "copied_reference": None,
        "repeated": 0.0,
        "kl_start": None,
    }
    return fields | changes


def test_means_are_over_those_that_have_a_value_and_every_shown_figure_has_a_line():
    other = line(chrf=None, components={}, finish_reason="length", completion="나")
    stats = compute_stats([line(), other])
    assert stats["chrf"] == 20.0 and stats["copied_reference"] is None
    assert (stats["clipped_ratio"], stats["distinct"], stats["format/quote"]) == (0.5, 1.0, 1.0)
    for stat in table():
        if stat.value_of_row is not None and stat.key in stats:
            assert stat.value_of_row(line()) is None or stats[stat.key] is not None
