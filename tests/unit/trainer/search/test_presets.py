"""Check that the presets in configs/search have the values of the published rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from tests.kits.real_tokenizers import real_tokenizer
from tests.kits.trainer.searching.finished import complete_turn, episode, search_turn
from trainer.chat.config import ChatConfig
from trainer.chat.render import render
from trainer.rl.forward import micro_batches
from trainer.search.config import SearchConfig
from trainer.search.records import GeneratedAnswer, JudgedAnswer, Question, Trajectory, Turn
from trainer.search.reward import with_reward
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


def rows_of_forced_ends() -> list[list[str]]:
    """Return the rows of the page's table that compares rewards with the published formula."""
    page = (CONFIGS.parents[1] / "docs/how-to/train-search.md").read_text(encoding="utf-8")
    table = page.split("| preset | how the episode ended |")[1].split("\n\n")[0]
    return [
        [cell.strip(" `*") for cell in line.strip("|").split("|")]
        for line in table.splitlines()[2:]
    ]


def finished(end: str, score: str) -> Trajectory:
    """Return an episode that ended so and has this NDCG or judge's score."""
    kind, value = score.split()
    turns = [search_turn(1, "deck_1"), search_turn(2, "deck_2")]
    if "own end" in end:
        turns.append(complete_turn(3))
    if "malformed" in end:
        turns[0] = Turn(number=1, text="hello", action="invalid", reason="no_think")
    sample = episode(turns=turns, end="forced" if "forced" in end else "complete")
    sample.answer = GeneratedAnswer(status="ok", text="42")
    judge_score = float(value) if kind == "judge" else 0.0
    sample.judged = JudgedAnswer(status="ok", score=judge_score, reason="")
    return sample


@pytest.mark.parametrize("row", rows_of_forced_ends(), ids=" ".join)
def test_the_page_says_what_a_forced_end_earns(row: list[str], monkeypatch: Any) -> None:
    """Compute each number of the table with the presets' own rewards, ours and the published."""
    name, end, score, published, local = row
    kind, value = score.split()
    if kind == "NDCG":
        monkeypatch.setattr("trainer.search.reward.ndcg", lambda *_: float(value))
    names = [name] if name == "phase1" else ["focused_r1", "focused_r2", "focused_r3"]
    assert name in ("phase1", "focused_")  # its star is stripped with the bold numbers
    for preset_name in names:
        settings = preset(preset_name).reward
        for expected, forced_completion in ((published, "score"), (local, None)):
            changes = {"forced_completion": forced_completion} if forced_completion else {}
            reward = with_reward(finished(end, score), settings.model_copy(update=changes)).reward
            assert reward is not None and reward.value is not None
            assert f"{reward.value:.2f}" == expected
