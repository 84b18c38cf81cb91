"""Check where parallel texts are cut and which parts are paired."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.text.sentences import sentence_starts
from scorekit.text.windows import add_context, align, common_boundaries, halve, pack, refine

PROSE = Path(__file__).parents[3] / "data/prose"
WORDS = [
    "rice",
    "Dr.",
    "3.5",
    "the end.",
    "집은 빨간색이다.",
    "你好。",
    "怎么了？",
    "هل؟",
    "\n",
    " ",
    "é",
    "e\u0301",
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))


def _ascends(borders, texts):
    assert borders[0] == tuple(0 for _ in texts)
    assert borders[-1] == tuple(map(len, texts))
    for before, after in pairwise(borders):
        assert before != after and all(a <= b for a, b in zip(before, after, strict=True))


@given(TEXTS)
def test_sentences_hold_every_character_once(text):
    starts = sentence_starts(text)
    assert starts[0] == 0 and starts[-1] == len(text)
    assert all(a < b for a, b in pairwise(starts))


def test_sentences_of_many_scripts():
    text = "Dr. Kim paid 3.5 won. Why?\n집은 크다. 그렇다！你好。怎么了？好。 هل جاء؟ نعم."
    starts = sentence_starts(text)
    assert [text[a:b].strip() for a, b in pairwise(starts)] == [
        "Dr. Kim paid 3.5 won.",
        "Why?",
        "집은 크다.",
        "그렇다！",
        "你好。",
        "怎么了？",
        "好。",
        "هل جاء؟",
        "نعم.",
    ]


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=3))
def test_common_borders_hold_every_character_once(texts):
    borders = common_boundaries(texts)
    if any(texts):
        _ascends(borders, texts)


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=3), st.integers(1, 30))
def test_parts_are_cut_until_they_fit(texts, max_tokens):
    def measure(parts):
        sizes = [sum(b - a for a, b in zip(*part, strict=True)) for part in parts]
        return [size if size <= max_tokens else None for size in sizes]

    borders, sizes = refine(texts, common_boundaries(texts), measure)
    if any(texts):
        _ascends(borders, texts)
    for part, size in zip(pairwise(borders), sizes, strict=True):
        longest = max(b - a for a, b in zip(*part, strict=True))
        assert size is not None or longest == 1  # single characters are not cut further


def test_a_part_is_cut_at_a_clause_and_in_the_same_share_of_each_text():
    texts = ["one two three four, five six seven eight", "하나 둘 셋 넷, 다섯 여섯 일곱 여덟"]
    src, mt = halve(texts, ((0, 0), tuple(map(len, texts))))
    assert (texts[0][:src], texts[1][:mt]) == ("one two three four, ", "하나 둘 셋 넷, ")
    assert halve(["a" * 9, "b" * 3], ((0, 0), (9, 3))) == (4, 1)
    assert halve(["a", "b"], ((0, 0), (1, 1))) is None
    woman = "\U0001f469\u200d\U0001f680"
    assert halve([woman * 2, ""], ((0, 0), (6, 0))) == (3, 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(9, 30))
def test_windows_are_as_few_as_can_be_and_none_is_over_the_limit(sizes, max_tokens):
    boundaries = pack(sizes, [[False]] * len(sizes), max_tokens)
    assert boundaries[0] == 0 and boundaries[-1] == len(sizes)
    assert all(sum(sizes[a:b]) <= max_tokens for a, b in pairwise(boundaries))
    fewest, remaining = 1, max_tokens
    for size in sizes:
        fewest, remaining = (
            (fewest, remaining - size) if size <= remaining else (fewest + 1, max_tokens - size)
        )
    assert len(boundaries) - 1 == fewest


def test_windows_are_about_equal_and_lack_no_text():
    assert pack([10] * 11, [[False]] * 11, 100) in ([0, 5, 11], [0, 6, 11])
    lacking = [[False, k >= 3] for k in range(6)]
    assert pack([20, 20, 30, 20, 20, 20], lacking, 90) == [0, 2, 6]  # [0, 3, 6] would be more equal


@given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 60))
def test_a_window_is_read_with_all_neighbours_that_fit(data, sizes, max_tokens):
    begin = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(begin + 1, len(sizes)))
    first, last = add_context(sizes, begin, end, max_tokens)
    read = sum(sizes[first:last])
    assert 0 <= first <= begin < end <= last <= len(sizes)
    assert read <= max_tokens or (first, last) == (begin, end)
    assert first == 0 or read + sizes[first - 1] > max_tokens
    assert last == len(sizes) or read + sizes[last] > max_tokens


def test_neighbours_of_both_sides_are_read_alike_and_at_an_end_those_of_the_other():
    assert add_context([10] * 10, 4, 6, 60) == (2, 8)
    assert add_context([10] * 10, 0, 2, 65) == (0, 6)
    assert add_context([10] * 10, 8, 10, 60) == (4, 10)
    assert add_context([10, 50, 10, 10, 10, 10], 2, 3, 40) == (2, 6)  # 50 do not fit
    assert add_context([5, 5, 5, 20, 5, 5, 5, 5], 3, 4, 45) == (0, 6)
    assert add_context([10, 90, 10], 1, 2, 60) == (1, 2)  # a part over the limit is read alone


def _pairs(name, left, right):
    rows = map(json.loads, (PROSE / name).read_text(encoding="utf-8").splitlines())
    return list({row[left].strip(): row[right].strip() for row in rows}.items())


def _agree(borders, true):
    """Return the share of boundaries that lie in the same pair on both sides."""
    inside = [
        any(
            all(a <= x <= b for a, x, b in zip(*row, strict=True))
            for row in ((before, border, after) for before, after in pairwise(true))
        )
        for border in borders[1:-1]
    ]
    return sum(inside) / len(inside)


def _document(pairs, joint, missing, joined):
    left, right, true = "", "", [(0, 0)]
    for k, (src, mt) in enumerate(pairs):
        left += src + joint
        if k not in missing:
            right += mt.rstrip(".。!?") + ", " if k in joined else mt + " "
        true.append((len(left), len(right)))
    return left, right, true


def test_sentences_of_joined_pairs_find_each_other():
    for name, langs, joint in (
        ("ted_zh_en.jsonl", ("zh", "en"), ""),
        ("ted_en_de.jsonl", ("en", "de"), " "),
        ("ko_en.jsonl", ("ko", "en"), " "),
    ):
        pairs = _pairs(name, *langs)[100:160]
        left, right, true = _document(pairs, joint, (), ())
        assert _agree(align(left, right), true) > 0.99, name
        rng = random.Random(0)
        missing, joined = set(rng.sample(range(60), 3)), set(rng.sample(range(60), 6))
        left, right, true = _document(pairs, joint, missing, joined)
        assert _agree(align(left, right), true) > 0.9, name


def test_a_passage_that_one_text_lacks_moves_no_other_border():
    pairs = _pairs("ted_en_de.jsonl", "en", "de")[:40]
    for missing in (range(28, 40), range(15, 23)):
        left, right, true = _document(pairs, " ", missing, ())
        borders, mirrored = align(left, right), align(right, left)
        assert _agree(borders, true) > 0.9, missing
        assert _agree([(b, a) for a, b in mirrored], true) > 0.9, missing
        ends = {left for left, _ in borders}  # a passage may be cut between its sentences, too
        assert sum(true[k][0] in ends for k in missing) >= len(missing) - 2, missing


def test_a_translation_without_marked_ends_of_sentences_is_cut_into_as_many():
    """Check texts like Thai or lower case, where no single source sentence is separate."""
    pairs = _pairs("ted_en_de.jsonl", "en", "de")[:40]
    bare = [(src, re.sub(r"[.!?:]", "", mt).lower()) for src, mt in pairs]
    left, right, true = _document(bare, " ", (), ())
    for a, b, expected in (
        (left, right, true),
        (right, left, [(y, x) for x, y in true]),
    ):
        borders = align(a, b)
        assert len(borders) > 30
        alone = [1 for x, y in pairwise(borders) if x[0] == y[0] or x[1] == y[1]]
        assert len(alone) <= 2
        wide = [expected[0], *expected[2::3], expected[-1]]  # near the correct position
        assert _agree(borders, wide) > 0.8
        assert all(b[position - 1] == " " for _, position in borders[1:-1])
