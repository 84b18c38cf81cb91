"""Check the benchmarks' helpers: an error must be visible in their stats."""

from __future__ import annotations

import pytest
from pydantic_core import to_json

from bench.chaos.endurance import count
from bench.common import Measurement, number
from scorekit.schemas import Scored
from scorekit.server.backend import Encoded
from testing.load import Answer, check, distinct_samples, expected_scores
from testing.work_log import WorkLog


def _results(samples):
    return [
        Scored.model_construct(id=sample["id"], ok=True, score=score)
        for sample, score in zip(samples, expected_scores(samples), strict=True)
    ]


def _tally(spoil=None):
    samples = [s | {"id": str(i)} for i, s in enumerate(distinct_samples(4))]
    answers = {index: [result] for index, result in enumerate(_results(samples))}
    if spoil:
        spoil(answers)
    tally = {"asked": 0, "answered": 0, "lost": 0, "doubled": 0, "wrong": 0}
    count(tally, samples, answers)
    return tally


def _swap(answers):
    answers[0], answers[1] = answers[1], answers[0]


@pytest.mark.parametrize(
    ("spoil", "error_kind", "times"),
    [
        (lambda answers: answers.pop(2), "lost", 1),
        (lambda answers: answers[2].append(answers[2][0]), "doubled", 1),
        (_swap, "wrong", 2),
        (lambda answers: answers.update({9: answers[0]}), "wrong", 1),
    ],
    ids=["lost", "doubled", "swapped", "never asked"],
)
def test_the_tally_of_the_kills_sees_every_fault(spoil, error_kind, times):
    assert _tally() == {"asked": 4, "answered": 4, "lost": 0, "doubled": 0, "wrong": 0}
    assert _tally(spoil)[error_kind] == times


def test_a_wrong_score_or_a_refusal_is_no_answer():
    samples = distinct_samples(2)
    results = [{"ok": True, "score": score} for score in expected_scores(samples)]
    good = to_json({"results": results})
    check(Answer(0, 200, good, 0.0), samples)
    for answer in (
        Answer(0, 429, good, 0.0),
        Answer(0, 200, to_json({"results": results[::-1]}), 0.0),
        Answer(0, 200, to_json({"results": results[:1]}), 0.0),
    ):
        with pytest.raises(AssertionError):
            check(answer, samples)


def test_the_pairs_of_the_load_have_250_bytes_and_are_distinct():
    samples = distinct_samples(500) + distinct_samples(500, 10**7)
    assert {len((s["src"] + s["mt"]).encode()) for s in samples} == {250}
    assert len({s["src"] for s in samples}) == len({s["mt"] for s in samples}) == 1000


def test_waste_and_arithmetic_are_counted_from_the_batches():
    class Backend:
        def forward(self, batch):
            return [None] * len(batch)

    backend = Backend()
    work = WorkLog.watching(backend)
    backend.forward([Encoded(10, {}, None), Encoded(6, {}, None)])
    backend.forward([Encoded(4, {}, None, rows=3)])
    assert (work.real_tokens, work.padded_tokens, work.batches) == (28, 32, 2)
    assert work.waste == 4 / 32
    shape = {"layers": 2, "hidden": 8, "intermediate": 32, "heads": 2}
    linear = 2 * (4 * 8 * 8 + 2 * 8 * 32)  # per token
    attention = 4 * 8  # per token and token that it attends to
    squares = 10**2 + 6**2 + 3 * 4**2
    assert work.flops(padded=False, **shape) == 2 * (28 * linear + squares * attention)


def test_an_aim_is_met_missed_or_not_there():
    assert Measurement("q", 1.3, "", at_least=1.25).met is True
    assert Measurement("q", 1.2, "", at_least=1.25).met is False
    assert Measurement("q", 1.1, "", at_least=1.0, at_most=1.0).met is False
    assert Measurement("q", 5.0, "").met is None
    assert Measurement("q", None, "", at_least=1.0, note="no GPU").met is None


@pytest.mark.parametrize(
    ("value", "formatted"),
    [
        (50_000, "50,000"),
        (12345.6, "12,346"),
        (1.347, "1.35"),
        (0.2, "0.2"),
        (0, "0"),
        (1.4e-06, "1.4e-06"),
        (99.59, "99.6"),
        (-0.48, "-0.48"),
    ],
)
def test_numbers_are_readable(value, formatted):
    assert number(value) == formatted
