"""Test which samples and scores of a batch are read back, whichever process has written them."""

from __future__ import annotations

import itertools

import pytest

from scorekit.schemas import Failed, JudgeScored, Scored, WireError
from trainer.runs.batches import RolloutBuffer
from trainer.translation.collect import BufferedSamples, PendingGroup
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.reward_batch import Composed, Scores
from trainer.translation.rollouts import TranslationRollout


def config(engine: str = "vllm", max_staleness: int = 2) -> TranslationConfig:
    generation = {"engine": engine, "vllm": {"url": "http://127.0.0.1:1"}}
    values = {"generation": generation, "rl": {"max_staleness": max_staleness}}
    return TranslationConfig.model_validate(values)


def samples(group: int, text: str, version: int = 5) -> list[TranslationRollout]:
    """Return two samples of a prompt."""
    return [
        TranslationRollout(
            group=group,
            prompt_input_ids=[1, 2],
            completion_token_ids=[3, 4],
            finish_reason="eos",
            old_logprobs=[-0.1 - number, -1e-17],
            weight_versions=[version, version + 1],
            trajectory_id=f"{group}-{number}",
            example_id=f"e{group}",
            src_text="Öffnen \u2028",
            prompt_text="Translate.",
            completion_text=f"{text} {number}",
            token_char_offsets=[(0, 3), (3, 5)],
            pair="de-DE>ko-KR",
        )
        for number in range(2)
    ]


def scores(message: str, *, retryable: bool = False) -> Scores:
    """Return scores that differ by their message."""
    error = WireError(type="overlong", message=message, retryable=retryable)
    return Scores({"metricx": [Failed(id=None, ok=False, error=error)] * 2})


def opened(folder, rank: int = 0, cfg: TranslationConfig | None = None) -> BufferedSamples:
    return BufferedSamples(RolloutBuffer(folder, rank), cfg or config())


def test_samples_and_scores_are_read_as_they_were_stored(tmp_path):
    buffered = opened(tmp_path)
    for group in (1, 0):
        buffered.store_rollouts(7, samples(group, "text"))
    buffered.store_scores(7, PendingGroup(samples(0, "text")), scores("a"))
    buffered.store_scores(7, PendingGroup(samples(1, "text")), scores("b", retryable=True))
    first, second = opened(tmp_path).read(7, [0, 1])
    assert first.rollouts == samples(0, "text") and first.scores() == scores("a")
    assert second.rollouts == samples(1, "text") and not second.was_stored
    assert [group.index for group in opened(tmp_path).read(7, [1])] == [1]
    assert opened(tmp_path).read(8, [0, 1]) == []


def test_each_kind_of_answer_is_read_as_it_was_stored(tmp_path):
    """Check a metric's, a judge's verdict, and a composite reward with its stats."""
    read = {"tokens": 1, "truncated": {"src": False, "mt": True}, "mt_covered": 2}
    answer = {"id": None, "ok": True, "score": 0.5, "cached": False}
    verdict = {"pass": True, "reason_code": "ok", "notes": ""}
    results = {
        "metricx": Scored.model_validate(answer | read),
        "judge": JudgeScored.model_validate(answer | {"verdict": verdict}),
        "definition": Composed.model_validate(answer | read | {"stats": {"component/a": 0.5}}),
    }
    scores_of_all = Scores({name: [result] * 2 for name, result in results.items()})
    buffered = opened(tmp_path)
    buffered.store_rollouts(7, samples(0, "text"))
    buffered.store_scores(7, PendingGroup(samples(0, "text")), scores_of_all)
    (stored,) = opened(tmp_path).read(7, [0])
    read_again = stored.scores().results
    assert read_again == scores_of_all.results
    assert {name: type(rows[0]) for name, rows in read_again.items()} == {
        name: type(result) for name, result in results.items()
    }


@pytest.mark.parametrize(("sampled_by", "scored_by"), itertools.product(range(2), range(2)))
def test_scores_are_those_of_their_samples_whichever_process_stored_them(
    tmp_path, sampled_by, scored_by
):
    opened(tmp_path, sampled_by).store_rollouts(7, samples(0, "text"))
    group = PendingGroup(samples(0, "text"))
    opened(tmp_path, scored_by).store_scores(7, group, scores("a"))
    (stored,) = opened(tmp_path).read(7, [0])
    assert stored.was_stored and stored.scores() == scores("a")


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (0, 0)])
def test_samples_that_were_made_again_because_they_were_too_old_replace_those(
    tmp_path, first, second
):
    old, new = samples(0, "old", version=1), samples(0, "new", version=5)
    opened(tmp_path, first).store_rollouts(7, old)
    opened(tmp_path, first).store_scores(7, PendingGroup(old), scores("of the old ones"))
    buffered = opened(tmp_path)
    assert buffered.read(7, [0]) == [] and buffered.dropped == 2
    opened(tmp_path, second).store_rollouts(7, new)
    (stored,) = buffered.read(7, [0])
    assert stored.rollouts == new and not stored.was_stored and buffered.dropped == 0


def test_a_process_that_samples_the_same_again_has_their_scores(tmp_path):
    buffered = opened(tmp_path, cfg=config("generate"))
    buffered.store_rollouts(7, samples(0, "text"))
    buffered.store_scores(7, PendingGroup(samples(0, "text")), scores("a"))
    restarted = opened(tmp_path, cfg=config("generate"))
    assert restarted.read(7, [0, 1]) == []  # group 1 is missing: the stream gives both again
    assert restarted.pending(samples(0, "text")).scores() == scores("a")
    assert not restarted.pending(samples(0, "other")).was_stored
    restarted.read(8, [0, 1])
    assert not restarted.pending(samples(0, "text")).was_stored
