"""Test which translation of a source is chosen, and how the chosen are mixed with pairs."""

from __future__ import annotations

import logging
from array import array
from collections import Counter

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.chat import CHATML, byte_tokenizer
from tests.kits.trainer.runs import example, letter_tokenizer, tiny_llama
from trainer.translation.best_of_n.candidates import Candidate, SampledSource
from trainer.translation.best_of_n.config import BestOfNConfig
from trainer.translation.best_of_n.replies import ReplyEnd
from trainer.translation.best_of_n.selection import choose, mix, pair_rows
from trainer.translation.config import GenerationConfig
from trainer.translation.prompting import Prompt

GENERATION = GenerationConfig(prompt_template="source", max_new_tokens=4)


def candidate(
    letter: int, reward: float | None, count: int = 1, *, is_complete: bool = True, text: str = "x"
) -> Candidate:
    return Candidate([letter, 1], text, count, is_complete, reward)


def source(*candidates: Candidate) -> SampledSource:
    return SampledSource(Prompt(example("ab"), array("i", [3, 4, 2])), [*candidates])


def replies(rows: list[dict]) -> list[int]:
    return [row["input_ids"][3] for row in rows]


def test_the_highest_reward_is_chosen_with_its_sampled_ids() -> None:
    chosen = choose([source(candidate(5, 1.0, 3), candidate(6, 2.0))], "reward", 0)
    (row,) = chosen.rows
    assert row["input_ids"] == [3, 4, 2, 6, 1] and row["action_mask"] == [0, 0, 0, 1, 1]
    assert (chosen.reward, chosen.mean_reward) == (2.0, 1.25)


def test_of_equal_rewards_the_more_frequent_is_chosen() -> None:
    sources = [source(candidate(5, 1.0), candidate(6, 1.0, 4))]
    assert replies(choose(sources, "reward", 0).rows) == [6]


def test_cut_empty_and_unscored_translations_are_not_chosen() -> None:
    sources = [
        source(candidate(5, 9.0, is_complete=False), candidate(6, 0.0)),
        source(candidate(5, 9.0, text=" "), candidate(7, 0.0)),
        source(candidate(5, None), candidate(8, -1.0)),
        source(candidate(5, 9.0, 0), candidate(9, 0.0)),  # only the greedy one
        source(candidate(5, None)),
        source(candidate(5, 1.0, is_complete=False)),
    ]
    for by in ("reward", "random"):
        chosen = choose(sources, by, 0)
        assert replies(chosen.rows) == [6, 7, 8, 9]
        assert chosen.left_out == Counter(
            {"no translation with a reward": 1, "no complete translation": 1}
        )


def test_a_random_choice_is_that_of_a_sample_whatever_its_reward() -> None:
    sources = [source(candidate(5, 9.0), candidate(6, 0.0, 3))] * 400
    picked = Counter(replies(choose(sources, "random", 1).rows))
    assert 250 < picked[6] < 350
    assert replies(choose(sources, "random", 1).rows) == replies(choose(sources, "random", 1).rows)
    assert replies(choose(sources, "random", 2).rows) != replies(choose(sources, "random", 1).rows)


def rows(kind: str, count: int) -> list[dict]:
    return [{"kind": kind, "id": f"{kind}{n}"} for n in range(count)]


def test_pairs_have_their_share_of_the_rows(caplog: pytest.LogCaptureFixture) -> None:
    mixed = mix(rows("sample", 30), rows("pair", 100), 0.25, 0)
    assert Counter(row["kind"] for row in mixed) == {"sample": 30, "pair": 10}
    assert len({row["id"] for row in mixed}) == 40
    assert mix(rows("sample", 30), rows("pair", 100), 0.25, 0) == mixed
    assert mix(rows("sample", 30), rows("pair", 100), 0.25, 1) != mixed
    assert not caplog.messages
    assert Counter(r["kind"] for r in mix(rows("sample", 30), rows("pair", 5), 0.5, 0)) == {
        "sample": 30,
        "pair": 5,
    }
    assert "0.5 of the rows would be 30 pairs, and pairs.path has 5: they are 0.14" in caplog.text
    assert mix([], rows("pair", 5), 1, 0) == rows("pair", 5)


def test_a_pair_has_the_prompt_of_a_sample_and_ends_as_the_policy_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = letter_tokenizer()
    model = tiny_llama(tokenizer)
    pairs = [example("ab", ref="cd"), example("a", ref="abcdefgh")]
    with caplog.at_level(logging.WARNING):
        (row,) = pair_rows(pairs, model, tokenizer, GENERATION)
    assert row["input_ids"] == [3, 4, 2, 5, 6, 1] and row["action_mask"] == [0, 0, 0, 1, 1, 1]
    assert "1 of 2 references are longer" in caplog.text
    with pytest.raises(UserError, match="1 of 2 rows have no ref_text"):
        pair_rows([pairs[0], example("b")], model, tokenizer, GENERATION)
    with pytest.raises(UserError, match="no row is short enough"):
        pair_rows(pairs[1:], model, tokenizer, GENERATION)


def test_a_reply_ends_with_the_token_of_the_template() -> None:
    tokenizer = byte_tokenizer(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|im_start|>"  # of a document, as another id
    assert tokenizer.eos_token_id != end
    model = tiny_llama(tokenizer)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    assert ReplyEnd(model, tokenizer).id == end
    hostile = ReplyEnd(model, tokenizer).reply_ids("a<|im_end|>b")
    assert hostile.count(end) == 1 and hostile[-1] == end
    tokenizer = letter_tokenizer()  # its template leaves the reply out
    assert ReplyEnd(tiny_llama(tokenizer), tokenizer).id == tokenizer.eos_token_id


def test_a_config_that_cannot_be_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"pairs.share: 1 trains on pairs alone. Set pairs.path"):
        BestOfNConfig(pairs={"share": 1})
    with pytest.raises(ValueError, match="SFT has no reference model"):
        BestOfNConfig(policy={"reference_path": "x"})
    assert BestOfNConfig().generation.num_samples_per_prompt == 16
