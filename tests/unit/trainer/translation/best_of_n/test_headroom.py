"""Test the numbers of a headroom on sources made by hand, and the words that they become."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from sacrebleu.metrics.bleu import BLEU

from scorekit.rewards.rules import chrf
from tests.kits.trainer.runs import example
from trainer.translation.best_of_n.candidates import Candidate, SampledSource
from trainer.translation.best_of_n.headroom import (
    BOTH,
    GREEDY,
    MBR,
    MEAN,
    ORACLE,
    OWN,
    REVERSE,
    REWARD,
    Headroom,
    in_words,
    mbr,
    measure,
    score_source,
    spearman,
)
from trainer.translation.prompting import Prompt

REF = "파일을 열고 저장하십시오"


def candidate(text: str, count: int, reward: float | None) -> Candidate:
    return Candidate([len(text), count], text, count, True, reward)


def source(*candidates: Candidate, greedy: int = 0, ref: str | None = REF) -> SampledSource:
    return SampledSource(Prompt(example("ab", ref=ref), array("i", [1])), [*candidates], greedy)


def headroom(*sources: SampledSource, samples: int = 4) -> Headroom:
    return measure(sources, [score_source(source, {}) for source in sources], samples)


#: The greedy translation is the worst by reward and chrF, the second the best by both.
RISING = source(
    candidate("열기", 1, -3.0), candidate(REF, 1, 2.0), candidate("파일을 저장", 2, 1.0)
)


def test_each_choice_takes_its_own_translation() -> None:
    result = headroom(*[RISING] * 3)
    quality = {text: chrf({"mt": text, "ref": REF}) for text in ("열기", REF, "파일을 저장")}
    values = {
        choice.name: (choice.reward.second, choice.chrf and choice.chrf.second)
        for choice in result.choices
    }
    mean_chrf = (quality["열기"] + quality[REF] + 2 * quality["파일을 저장"]) / 4
    assert values[GREEDY] == (-3.0, pytest.approx(quality["열기"]))
    assert values[REWARD] == (2.0, pytest.approx(100.0)) == values[ORACLE]
    assert values[MEAN] == (pytest.approx(0.25), pytest.approx(mean_chrf))
    assert result.choice(REWARD).rank_correlation == (pytest.approx(1.0), None, None, 3)
    assert result.choice(REWARD).length == pytest.approx(1.0)
    assert result.different == 3 and result.sources == 3 and result.unscored == 0


def test_bleu_of_a_choice_is_sacrebleus() -> None:
    other = source(candidate("열고 저장하십시오", 1, 0.0), candidate("파일을 열고", 1, 1.0))
    result = headroom(RISING, other, samples=2)
    bleu = BLEU(tokenize="char")
    greedy = bleu.corpus_score(["열기", "열고 저장하십시오"], [[REF, REF]]).score
    best = bleu.corpus_score([REF, "파일을 열고"], [[REF, REF]]).score
    choice = result.choice(REWARD)
    assert choice.bleu.first == pytest.approx(greedy)
    assert choice.bleu.second == pytest.approx(best)


def test_log_probabilities_choose_and_what_has_none_is_never_chosen() -> None:
    values = {OWN: [-1.0, -2.0, -3.0], REVERSE: [None, -1.0, -0.5]}
    scored = score_source(RISING, values)
    result = measure([RISING], [scored], 4)
    assert result.choice(OWN).reward.second == -3.0
    assert result.choice(REVERSE).reward.second == 1.0
    assert scored.values[BOTH][1:] == [-3.0, -3.5]
    assert result.choice(BOTH).reward.second == 2.0


def test_a_sample_without_a_reward_takes_no_part_and_is_counted() -> None:
    failed = source(candidate("열기", 1, 1.0), candidate(REF, 3, None))
    unscored = source(candidate("열기", 4, None))
    result = headroom(failed, unscored)
    assert (result.sources, result.left_out, result.unscored) == (1, 1, 7)
    assert result.choice(ORACLE).chrf.second < 50  # not that of REF
    assert "nothing to say" in in_words(headroom(unscored))


def test_a_greedy_translation_that_was_not_sampled_is_no_sample() -> None:
    result = headroom(source(candidate(REF, 0, 9.0), candidate("열기", 4, 1.0)))
    assert result.choice(GREEDY).reward.second == 9.0
    assert result.choice(REWARD).reward.second == 1.0
    assert result.different == 1


def test_mbr_prefers_what_the_other_samples_are_like() -> None:
    values = mbr([candidate(REF, 1, 0.0), candidate("파일을 열고", 5, 0.0), candidate("x", 1, 0.0)])
    assert max(range(3), key=values.__getitem__) == 1
    assert values[2] == pytest.approx(100 / 7)
    assert headroom(RISING).choice(MBR) is not None


def test_without_references_only_the_reward_is_told() -> None:
    result = headroom(*[replace(RISING, prompt=Prompt(example("ab"), array("i", [1])))] * 12)
    assert not result.has_references and result.choice(ORACLE) is None
    assert all(choice.chrf is choice.bleu is None for choice in result.choices)
    assert result.choice(REWARD).length == pytest.approx(len(REF) / len("열기"))
    words = in_words(result)
    assert "no references" in words and "+5.000 [+5.000, +5.000]" in words


def test_spearman_ranks_ties_in_the_middle() -> None:
    assert spearman([1, 2, 3], [1, 8, 27]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)  # scipy's spearmanr
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None


def varied(reward_of_best: float) -> list[SampledSource]:
    """Return sources on which REF is better than greedy; its reward is above or below."""
    return [
        source(candidate("파일 열", 2, 0.0), candidate(REF[: 6 + k % 5], 2, reward_of_best))
        for k in range(12)
    ]


def test_the_words_follow_the_interval() -> None:
    better = in_words(headroom(*varied(1.0)))
    assert "the reward finds better translations" in better and "of +" in better
    unclear = in_words(headroom(*varied(-1.0)))
    assert "not clear of 0" in unclear and "Change the reward" in unclear
    worse = [
        source(candidate(REF, 2, 0.0), candidate("파일 열", 2, 1.0), candidate("열", 1, 0.0))
        for _ in range(12)
    ]
    assert "prefers worse translations" in in_words(headroom(*worse))
    assert "fewer than 10 sources" in in_words(headroom(*varied(1.0)[:3]))
    same = [source(candidate(REF, 4, 0.0)) for _ in range(12)]
    assert "neither is clear" in in_words(headroom(*same))


def test_a_better_choice_without_the_reward_is_named() -> None:
    sources = [
        source(candidate("열", 1, 1.0), candidate(REF, 3, 0.0), candidate(REF[:9], 3, 0.0))
        for _ in range(12)
    ]
    assert f"Without this reward, {MBR} has" in in_words(headroom(*sources))
