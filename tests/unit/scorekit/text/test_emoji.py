"""Check which emoji a translation may leave out."""

from __future__ import annotations

import pytest

from scorekit.text.findings import Certainty, lost_emoji


@pytest.mark.parametrize(
    ("src", "mt", "seen", "certainty"),
    [
        ("Such a genius 🙄", "진짜 천재다", "🙄", Certainty.POSSIBLE),
        ("Dinner: 🍕 or 🍣?", "저녁: 🍕 아니면?", "🍣", Certainty.POSSIBLE),
        ("I love you ❤️", "사랑해 💔", "❤ became 💔", Certainty.LIKELY),
        ("Made in 🇰🇷", "Made in 🇯🇵", "🇰🇷 became 🇯🇵", Certainty.LIKELY),
        ("Party 🎁 lol", "파티 ㅋㅋ", "🎁", Certainty.POSSIBLE),
    ],
)
def test_lost_emoji_are_doubts(src, mt, seen, certainty):
    assert lost_emoji(src, mt) == (seen, certainty)


@pytest.mark.parametrize(
    ("src", "mt"),
    [
        ("You kill me 😂😂😂", "웃겨 죽겠다 😂"),
        ("Thanks 👍🏽", "고마워 👍"),
        ("So sad 😭", "너무 슬퍼 ㅠㅠ"),
        ("☎ 02-123 © ✔ ★", "02-123"),
        ("No emoji", "없음 🎉"),
        ("Weekend ☀️", "주말 ☀"),
    ],
)
def test_fewer_of_the_same_laughter_and_signs_are_right(src, mt):
    assert lost_emoji(src, mt) is None
