"""Check the config of a search run."""

from __future__ import annotations

from typing import Any

import pytest

from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.runs.config import check_config
from trainer.search.ask import reward_of_one
from trainer.search.config import SearchConfig, SearchRewardConfig
from trainer.search.services import open_policy


def test_a_turn_has_room_for_a_thought_and_an_action_whatever_else_is_set() -> None:
    cfg = load_config(SearchConfig, None, ["generation.temperature=0.7"])
    assert (cfg.generation.max_new_tokens, cfg.generation.temperature) == (1024, 0.7)


def test_episodes_of_a_question_are_asked_for_in_one_place() -> None:
    with pytest.raises(UserError, match="num_samples_per_prompt"):
        load_config(SearchConfig, None, ["generation.num_samples_per_prompt=4"])


@pytest.mark.parametrize(
    "wish", ["episode.context_length=4096", "generation={engine: vllm, vllm: {url: http://here}}"]
)
def test_what_a_server_is_never_asked_for_is_refused(wish: str) -> None:
    cfg = load_config(SearchConfig, None, ["server.url=http://127.0.0.1:9/v1", wish])
    with pytest.raises(UserError, match=rf"{wish.partition('=')[0]}.*Remove the key"):
        with open_policy(cfg):
            raise AssertionError("it was opened")


@pytest.mark.parametrize(
    ("preset", "answer", "gold", "weights"),
    [
        ("phase2", True, True, (0.8, 0.2, 0.0)),  # as in a run
        ("phase2", True, False, (0.8, 0.0, 0.0)),
        ("phase2", False, True, (0.0, 0.2, 0.0)),
        ("phase2", False, False, (0.0, 0.0, 1.0)),
        ("phase1", True, True, (1.0, 0.9, 0.1)),
        ("phase1", False, True, (0.0, 0.9, 0.1)),
        ("unified", True, True, (0.4, 0.5, 0.1)),
    ],
)
def test_one_question_is_rewarded_as_a_run_is_by_what_it_tells(
    preset: Any, answer: bool, gold: bool, weights: tuple[float, ...]
) -> None:
    reward_cfg = reward_of_one(SearchRewardConfig(preset=preset), answer=answer, gold=gold)
    assert (reward_cfg.w_judge, reward_cfg.w_ndcg, reward_cfg.w_format) == weights
    assert reward_cfg.gate is (preset != "phase2" and not answer)  # a gate would skip the generator
    assert not (answer and reward_cfg.forced_completion == "zero")  # so would this


@pytest.mark.parametrize(
    ("settings", "pixels"),
    [
        ([], 1_572_864),
        (["answering.generator.max_pixels=800000"], 800_000),
        (["answering.generator.images=shown"], None),
        (["reward.preset=phase1"], None),  # nobody answers
    ],
)
def test_originals_are_stored_where_a_generator_answers_from_them(
    settings: list[str], pixels: int | None
) -> None:
    assert load_config(SearchConfig, None, settings).original_pixels == pixels


def test_a_run_from_before_there_were_originals_goes_on_only_with_images_as_shown() -> None:
    cfg = load_config(SearchConfig, None, [])
    recorded = cfg.model_dump(mode="json")
    check_config(cfg, recorded)
    del recorded["answering"]["generator"]["images"]
    with pytest.raises(UserError, match=r"generator.images: 'shown' then, 'original' now"):
        check_config(cfg, recorded)
    check_config(load_config(SearchConfig, None, ["answering.generator.images=shown"]), recorded)
