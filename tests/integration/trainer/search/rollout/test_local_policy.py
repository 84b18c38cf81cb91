"""Check that a folder becomes a policy that takes turns or gives a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.searching.episodes import played
from tests.kits.trainer.searching.policies import TINY_SIGHT, save_tiny
from trainer.search.config import SearchConfig
from trainer.search.rollout.sampled import local_policy

ROOT = Path(__file__).parents[5]
EPISODE = {"sight": TINY_SIGHT, "max_turns": 2, "context_length": 8192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("policy"))


def config(folder, **sections):
    values = {
        "policy": {"path": str(folder)},
        "generation": {"max_new_tokens": 8, "num_samples_per_prompt": 1},
        "episode": EPISODE,
        "misc": {"seed": 5, "device": "cpu"},
    }
    return SearchConfig.model_validate(values | sections)


@pytest.mark.parametrize("observation", ["image", "text"])
def test_a_folder_takes_turns_and_the_same_ones_again(folder, observation):
    cfg = config(folder, episode=EPISODE | {"observation": observation})
    first, second = (played(local_policy(cfg), **cfg.episode.model_dump()) for _ in range(2))
    assert [turn.text for turn in first[0].turns] == [turn.text for turn in second[0].turns]
    assert first[0].end == "forced" and first[0].tokens == second[0].tokens
    assert sum(first[0].tokens.action_mask) == sum(t.tokens or 0 for t in first[0].turns)


def test_an_episode_that_ended_leaves_nothing_in_the_sampler():
    cfg = config(
        ROOT / "demo/models/search_policy",
        episode={"max_turns": 2, "context_length": 1024, "observation": "text"},
    )
    policy, names = local_policy(cfg), set()
    cache = policy._sampler._turn_cache

    class Noting(dict):
        def __setitem__(self, name, read):
            names.add(name)
            super().__setitem__(name, read)

    cache._read = Noting()
    (episode,) = played(policy, **cfg.episode.model_dump())
    assert names == {episode.trajectory_id} and len(cache) == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policy": {"path": "/nowhere/at/all"}}, "policy.path: /nowhere/at/all: no such folder"),
        ({"generation": {"engine": "vllm", "vllm": {"url": "http://x"}}}, "name a server in"),
        ({"episode": {**EPISODE, "context_length": 10_000}}, "the policy reads 8192 ids"),
        ({"episode": {**EPISODE, "sight": {}}}, "sight.factor: it is 28"),
    ],
)
def test_what_does_not_go_together_is_told_before_weights_load(
    folder, sections, message, monkeypatch
):
    monkeypatch.setattr(
        "trainer.search.rollout.sampled.load_policy", lambda *_: pytest.fail("it loads")
    )
    with pytest.raises(UserError, match=message):
        local_policy(config(folder, **sections))
