"""Check the anchors: their pairs, their values and the inputs without anchors."""

from __future__ import annotations

import dataclasses
import logging
import math
import random

import numpy as np
import pytest

from scorekit.client.embeddings import EmbeddingModel
from scorekit.errors import UserError
from trainer.roleplay.calibrate import write_page
from trainer.roleplay.calibration import (
    CANARIES,
    LEAST_PAIRS,
    Anchors,
    Calibration,
    fit,
    read_calibration,
    separation,
)
from trainer.roleplay.turn import RoleplayTurn


class Topics:
    """Embeds a text as the vector of its first word plus a share of its full text's."""

    def __init__(self, share=0.3):
        self.share, self.calls = share, []

    def info(self):
        return EmbeddingModel("topics", "sha", "cls", 32, 512)

    def embed(self, texts, canary=None):
        self.calls.append(list(texts))
        return [_random(text.split()[0]) + self.share * _random(text) for text in texts]

    def close(self):
        pass


def _random(text):
    return np.random.default_rng(random.Random(text).getrandbits(32)).normal(size=32)


def _turns(n, *, reason=True, level=None):
    return [
        RoleplayTurn(
            f"{k:03}",
            ({"role": "user", "content": f"주제{k // 2} 질문 {k}"},),
            f"주제{k // 2} 대답 {k}",
            character_name="유나",
            dialogue=f"{k // 2}" if reason else None,
            place=k % 2 if reason else None,
        )
        for k in range(n)
    ]


def test_anchors_are_the_middle_of_false_pairs_and_the_ninth_tenth_of_true_ones():
    calibration = fit(Topics(), _turns(80), rows=512)
    assert calibration.grounded.true_pairs == 80
    assert calibration.reference.true_pairs == 40
    for anchors in (calibration.grounded, calibration.reference):
        assert -0.1 < anchors.low < 0.1 < 0.8 < anchors.high < 1
        assert anchors.separation > 0.97
        assert sum(anchors.true_cosines) == anchors.true_pairs
        assert sum(anchors.false_cosines) == anchors.false_pairs
    assert calibration.canaries.keys() == set(CANARIES)
    assert (calibration.model, calibration.revision, calibration.pooling) == (
        "topics",
        "sha",
        "cls",
    )


def test_the_order_of_the_data_and_the_second_time_change_nothing_and_the_seed_does():
    turns = _turns(100)
    first = fit(Topics(), turns, rows=40)
    assert fit(Topics(), turns[::-1], rows=40) == first
    assert fit(Topics(), turns, rows=40, seed=1) != first
    assert first.grounded.true_pairs == 40


def test_equal_texts_are_embedded_once_in_one_call():
    embedder = Topics()
    fit(embedder, [dataclasses.replace(turn, id=f"{turn.id}b") for turn in _turns(60)], rows=512)
    (texts,) = embedder.calls
    assert len(set(texts)) == len(texts)


def test_few_pairs_are_refused_with_their_number():
    with pytest.raises(UserError, match=f"{LEAST_PAIRS - 1} turns with a reference"):
        fit(Topics(), _turns(LEAST_PAIRS - 1), rows=512)
    fit(Topics(), _turns(LEAST_PAIRS), rows=512)
    bare = [dataclasses.replace(turn, reference=None) for turn in _turns(40)]
    with pytest.raises(UserError, match="no references"):
        fit(Topics(), bare, rows=512)


def test_a_model_that_cannot_tell_is_refused_with_the_figures():
    with pytest.raises(UserError, match=r"in \d+% of cases.*cannot separate them"):
        fit(Topics(share=1000), _turns(200), rows=512)


def test_a_model_that_tells_little_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        calibration = fit(Topics(share=3), _turns(300), rows=512)
    assert 0.55 <= calibration.grounded.separation < 0.7
    assert "the separation is small" in caplog.text


def test_without_neighbours_the_reference_itself_is_the_upper_anchor(caplog, tmp_path):
    alone = [dataclasses.replace(turn, dialogue=turn.id) for turn in _turns(60)]
    calibration = fit(Topics(), alone, rows=512)
    assert calibration.reference.high == 1
    assert calibration.reference.true_pairs == 0
    assert "only the reference itself" in caplog.text
    write_page(tmp_path / "page.html", calibration, "turns")
    assert "is the reference itself" in (tmp_path / "page.html").read_text("utf-8")


def test_neighbours_of_rows_that_tell_no_dialogue_are_of_one_character_and_scenario():
    turns = [
        dataclasses.replace(turn, scenario=f"{k // 2}")
        for k, turn in enumerate(_turns(60, reason=False))
    ]
    assert fit(Topics(), turns, rows=512).reference.true_pairs == 30


def test_separation_is_the_area_under_the_curve():
    assert separation(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1
    assert separation(np.array([0.0, 1.0]), np.array([2.0, 3.0])) == 0
    assert separation(np.array([1.0]), np.array([1.0])) == 0.5


def test_scores_are_linear_between_the_anchors_and_clipped():
    anchors = Anchors(low=0.2, high=0.7)
    assert [anchors.score(x) for x in (-1, 0.2, 0.45, 0.7, 1)] == pytest.approx([0, 0, 0.5, 1, 1])


class Broken(Topics):
    """Embeds every text except the canaries as a vector of one repeated number."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def embed(self, texts, canary=None):
        broken = np.full(32, self.number)
        return [_random(text) if text in CANARIES else broken for text in texts]


@pytest.mark.parametrize(
    ("number", "reason"), [(0.0, "a vector of zeros"), (math.nan, "is not finite")]
)
def test_nothing_is_fitted_on_what_is_no_vector(number, reason):
    with pytest.raises(UserError, match=rf"reward\.embedding_model: .*{reason}"):
        fit(Broken(number), _turns(60), rows=512)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not a calibration"),
        ('{"model": "a", "dimension": 4}', "grounded: Field required"),
        ('{"model":"a","dimension":4,"grounded":{"low":0.9,"high":0.1}}', "high must be larger"),
        ('{"model":"a","dimension":4,"grounded":{"low":NaN,"high":1}}', "grounded.low"),
        ('{"model":"a","dimension":2,"canaries":{"x":[0,0]}}', "a vector of zeros, of 'x'"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, content, reason):
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(UserError, match=reason) as error:
        read_calibration(path)
    assert str(path) in str(error.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_calibration(tmp_path / "none.json")


def test_what_was_written_is_read(tmp_path):
    calibration = fit(Topics(), _turns(60), rows=512)
    calibration.write(tmp_path / "calibration.json")
    assert read_calibration(tmp_path / "calibration.json") == calibration
    assert isinstance(calibration, Calibration)
