"""Check prices, and the estimates of what a run may cost."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from scorekit.errors import UserError
from tests.kits.trainer.search_answers import episode
from trainer.search.answer.config import AnsweringConfig, MoneyConfig
from trainer.search.answer.estimate import estimate, worst_case
from trainer.search.records import ApiUsage, GeneratedAnswer, Trajectory

PRICE = {"prompt": 1.0, "completion": 10.0}  # a million tokens


def test_a_cap_without_prices_is_a_mistake():
    with pytest.raises(ValidationError, match="without a price"):
        MoneyConfig(cap=5.0)


CONFIG = AnsweringConfig.model_validate(
    {
        "generator": {"model": "g", "max_output_tokens": 100, "tokens_per_image": 1000},
        "money": {"generator": PRICE, "judge": PRICE, "cap": 1.0},
    }
)


def paid(*pages: str, **charge: float) -> Trajectory:
    answer = GeneratedAnswer(status="ok", text="12", charge=ApiUsage(calls=1, **charge))
    return episode(*pages).model_copy(update={"answer": answer})


def test_an_estimate_without_a_paid_episode_is_reckoned_from_the_config():
    sample = [episode("d_1", "d_2"), episode(), episode("d_1", end="declined")]
    estimated = estimate(sample, 3000, CONFIG)
    assert (estimated.sampled, estimated.num_requested, estimated.paid) == (3, 1, 0)
    assert estimated.generator.calls == estimated.judge.calls == 1000
    assert 2_000_000 < estimated.generator.prompt_tokens < 2_300_000
    assert estimated.generator.completion_tokens == 1000 * 100


def test_an_estimate_takes_what_was_paid_for_as_the_measure_of_the_rest():
    words = estimate([episode("d_1")], 1, CONFIG).generator.prompt_tokens - 1000
    paid_episode = paid("d_1", "d_2", prompt_tokens=words + 600, completion_tokens=3)
    cached = episode("d_1").model_copy(
        update={"answer": GeneratedAnswer(status="ok", text="12", charge=ApiUsage(cached=True))}
    )
    estimated = estimate([paid_episode, cached, episode()], 3000, CONFIG)
    assert (estimated.sampled, estimated.num_requested, estimated.paid) == (3, 2, 1)
    assert estimated.generator.prompt_tokens == 1000 * (words + 600 + words + 300)
    assert estimated.generator.completion_tokens == 1000 * (3 + 3)
    spent = estimated.generator.prompt_tokens / 1e6 + estimated.generator.completion_tokens / 1e5
    assert estimated.generator.money == pytest.approx(spent)
    total = estimated.generator.money + estimated.judge.money
    assert estimated.cap_episodes == int(3000 / total)
    assert "in all: at most" in "".join(estimated.lines())


def test_without_any_episode_the_estimate_is_the_most_that_a_run_may_take():
    questions = [episode("d_1").question, episode("d_1", question="How much" * 9).question]
    estimated = worst_case(questions, 1000, 15, CONFIG)
    full = [episode(*(f"d_{n}" for n in range(9)), question=q.question) for q in questions]
    assert estimated == estimate(full, 1000, CONFIG)  # of which max_images are shown
    assert (
        worst_case(questions, 1000, 1, CONFIG).generator.prompt_tokens
        < estimated.generator.prompt_tokens
    )


def test_an_estimate_from_nothing_is_a_mistake():
    with pytest.raises(UserError, match="no episode"):
        estimate([], 10, CONFIG)
