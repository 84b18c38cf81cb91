"""Check that near duplicates of earlier sources are found, whatever the batch size."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.sources import screen
from synth.sources.screen import NearDuplicates, plan_bands, signatures
from tests.kits.examples import examples


def find(folder, texts, threshold=0.8, batch=1024, able=None):
    folder.mkdir(exist_ok=True)
    near = NearDuplicates(folder, threshold)
    for start in range(0, len(texts), batch):
        near.add(texts[start : start + batch])
    able = np.ones(len(texts), dtype=bool) if able is None else np.array(able)
    return near.find(able).tolist()


def jaccard(first, second):
    grams = [{(t + "\0" * 4)[i : i + 5] for i in range(len(t))} for t in (first, second)]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def words(rng, count):
    return " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(count))


def test_a_text_with_a_changed_word_resembles_the_first_of_its_kind(tmp_path):
    rng = random.Random(1)
    first, other = words(rng, 40), words(rng, 40)
    changed = first.replace(first.split()[20], "changed")
    texts = [other, first, changed, first.upper() + "  ", words(rng, 40)]
    assert find(tmp_path, texts) == [-1, -1, 1, 1, -1]
    assert find(tmp_path, texts, able=[1, 0, 1, 1, 1]) == [-1, -1, -1, 2, -1]
    assert find(tmp_path, texts, threshold=1.0) == [-1, -1, -1, 1, -1]


def test_korean_chinese_and_thai_are_compared_by_characters(tmp_path):
    korean = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등"
    chinese = "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待"
    thai = "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ"
    texts = [f"{korean}하다.", f"{korean}하니", f"{chinese}。", f"{chinese}！", thai]
    assert find(tmp_path, texts, threshold=0.7) == [-1, 0, -1, 2, -1]


def test_estimates_are_near_the_true_share():
    rng = random.Random(5)
    errors = []
    for _ in range(60):
        original = words(rng, 30).split()
        modified = list(original)
        for position in rng.sample(range(30), rng.randrange(12)):
            modified[position] = words(rng, 1)
        a, b = " ".join(original), " ".join(modified)
        left, right = signatures([a, b])
        errors.append(float((left == right).mean()) - jaccard(a, b))
    assert abs(np.mean(errors)) < 0.02 and np.std(errors) < 0.06


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95, 1.0])
def test_bands_let_few_pairs_at_the_threshold_go_by(threshold):
    bands, rows = plan_bands(threshold)
    assert bands * rows <= 126
    assert (1 - threshold**rows) ** bands <= 0.01


some_texts = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 39), max_size=3)), max_size=25
)


def make_texts(plan):
    texts = []
    for base, changes in plan:
        parts = words(random.Random(base), 40).split()
        for position in changes:
            parts[position] = f"new{position}"
        texts.append(" ".join(parts))
    return texts


@settings(max_examples=examples(25))
@given(some_texts, st.integers(1, 7), st.integers(1, 9))
def test_what_is_taken_out_resembles_an_earlier_text_and_what_stays_does_not(
    tmp_path_factory, plan, batch, chunk
):
    texts = make_texts(plan)
    folder = tmp_path_factory.mktemp("near")
    matches = find(folder, texts)
    chunk_size, screen._CHUNK = screen._CHUNK, chunk
    try:
        assert find(folder, texts, batch=batch) == matches
    finally:
        screen._CHUNK = chunk_size
    marks = signatures(texts) if texts else []
    bands, rows = plan_bands(0.8)
    for index, match in enumerate(matches):
        if match >= 0:
            assert match < index
            assert (marks[index] == marks[match])[: bands * rows].mean() >= 0.8
    unmatched = [index for index, match in enumerate(matches) if match < 0]
    for number, index in enumerate(unmatched):
        for earlier in unmatched[:number]:
            assert (marks[index] == marks[earlier])[: bands * rows].mean() < 0.93


def test_many_copies_of_a_text_are_one(tmp_path):
    rng = random.Random(3)
    copied = words(rng, 30)
    texts = [copied if i % 2 else words(rng, 30) for i in range(400)]
    matches = find(tmp_path, texts)
    assert [matches[i] for i in range(3, 400, 2)] == [1] * 199
    assert all(matches[i] < 0 for i in range(0, 400, 2)) and matches[1] < 0


def test_nothing_and_the_shortest_texts_are_no_error(tmp_path):
    assert find(tmp_path, []) == []
    assert find(tmp_path, ["a", "b", "a", ""]) == [-1, -1, 0, -1]
