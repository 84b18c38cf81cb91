"""Check that the presets in configs/search have the values of the published rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from tests.kits.real_tokenizers import real_tokenizer
from trainer.chat.config import ChatConfig
from trainer.chat.render import render
from trainer.rl.forward import micro_batches
from trainer.search.config import SearchConfig
from trainer.search.records import Question
from trainer.search.rollout.prompt import opening, template_messages

CONFIGS = Path(__file__).parents[4] / "configs/search"
UNSET_MODELS = {"answering.generator.model": "", "answering.judge.model": None}
SERVICE_VALUES = {
    "answering.generator.model": "gpt-5-mini-2025-08-07",
    "answering.generator.effort": "medium",
    "answering.generator.deadline_s": 600,
    "answering.judge.model": "gemini-3-flash-preview",
    "answering.judge.deadline_s": 90,
    "rollout.deadline_s": 690,
}


def both(max_calls: int) -> dict[str, int]:
    """Return config keys that allow this number of concurrent calls to generator and judge."""
    return {
        "answering.generator.max_requests": max_calls,
        "answering.judge.max_in_flight": max_calls,
    }


#: name: B, N, B x N, turns, weights of judge, NDCG and form, gate, tokens of an answer, other keys.
TABLE: dict[str, tuple[int, int, int, int, tuple[float, ...], bool, int | None, dict[str, Any]]] = {
    "phase1": (32, 4, 128, 7, (0, 0.9, 0.1), True, None, UNSET_MODELS),
    "phase2": (32, 4, 128, 7, (0.8, 0.2, 0), False, 2048, SERVICE_VALUES | both(64)),
    "focused_r1": (16, 8, 128, 7, (1, 0, 0), False, 3072, SERVICE_VALUES | both(64)),
    "focused_r2": (8, 16, 128, 15, (1, 0, 0), False, 3072, SERVICE_VALUES | both(64)),
    "focused_r3": (32, 16, 512, 15, (1, 0, 0), False, 5120, SERVICE_VALUES | both(512)),
}
#: Keys of all five presets.
COMMON = {
    "rl.advantage_norm": "grpo",
    "rl.algorithm": "gspo",
    "rl.clip_eps": 3e-4,
    "rl.clip_eps_high": 4e-4,
    "rl.loss_mean": "sequence",
    "rl.advantage_eps": 1e-6,
    "rl.lr": 1e-6,
    "rl.warmup_ratio": 0.1,
    "rl.max_grad_norm": 1,
    "rl.entropy_coef": 0,
    "rl.kl_coef": 0,
    "rl.ppo_epochs": 1,
    "rl.minibatch_size": 8,
    "rl.micro_batch_tokens": 1,
    "rl.epochs": 1,
    "data.max_prompt_length": 256,
    "episode.max_response_length": 2048,
    "generation.temperature": 1,
    "generation.top_p": 1,
    "generation.top_k": 0,
    "misc.save_every_n_updates": 30,
}


def value_at(cfg: SearchConfig, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def preset(name: str) -> SearchConfig:
    return load_config(SearchConfig, CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_holds_its_row_of_the_table(name: str) -> None:
    questions, samples, episodes, turns, weights, gate, tokens, other_keys = TABLE[name]
    cfg = preset(name)
    assert (cfg.rl.batch_size, cfg.rollout.n_agent) == (questions, samples)
    assert cfg.rl.batch_size * cfg.rl.grad_accum * cfg.rollout.n_agent == episodes
    assert cfg.episode.max_turns == turns
    assert tuple(cfg.reward.weights.values()) == weights and cfg.reward.gate is gate
    if tokens is not None:
        assert cfg.answering.generator.max_output_tokens == tokens
    expected = COMMON | other_keys
    assert {key: value_at(cfg, key) for key in expected} == expected


@pytest.mark.parametrize("name", TABLE)
def test_a_pass_is_one_episode_however_short(name: str) -> None:
    tokens = preset(name).rl.micro_batch_tokens
    assert list(micro_batches([1, 9000, 300], tokens)) == [[0], [2], [1]]


@pytest.mark.parametrize("name", ["phase2", "focused_r1", "focused_r2", "focused_r3"])
def test_tokens_in_flight_leave_room_for_all_calls_in_flight(name: str) -> None:
    generator = preset(name).answering.generator
    call_tokens = generator.max_images * generator.tokens_per_image + generator.max_output_tokens
    assert generator.max_requests * (call_tokens + 1000) <= generator.max_tokens


def test_the_instructions_are_as_long_as_is_said() -> None:
    """Check the length of docs/how-to/train-search.md, which a question's limit excludes."""
    cfg, tokenizer = preset("phase1"), real_tokenizer("qwen3")
    messages = opening(Question(id="q", question="How much?", reference_answer="x"), cfg.episode)
    prompt = render(tokenizer, template_messages(messages), ChatConfig(), generation_prompt=True)
    question_ids = tokenizer(messages[-1].text)["input_ids"]
    assert len(tokenizer(prompt)["input_ids"]) - len(question_ids) == 222


def test_an_epoch_is_as_many_updates_as_its_questions_fill() -> None:
    rl = preset("focused_r2").rl.over(352)  # the table's focused_round2
    assert (rl.num_updates, rl.warmup_updates) == (44, 4)


def test_an_epoch_of_phase_2_over_bucket_a_is_the_step_that_round_1_starts_from() -> None:
    assert preset("phase2").rl.over(1560).num_updates == 48  # the table's global_step_48
