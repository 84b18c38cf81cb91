"""Check speech levels, player actions and questions on labeled Korean text.

`pytest -rP` prints precision and recall.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trainer.roleplay.korean.acting import acts, has_particle
from trainer.roleplay.korean.kiwi import sentences
from trainer.roleplay.korean.names import find_name
from trainer.roleplay.korean.questions import asks
from trainer.roleplay.korean.speech import levels

DATA = Path(__file__).parents[3] / "data/roleplay"
AIM = 0.95


def _labeled(name):
    label = ""
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            label = line[2:]
        else:
            yield label, line


def _level(text):
    """Return the last decided level of a line that may have several sentences."""
    sentence_levels = levels(text)
    decided = [level for level in sentence_levels if level != "fragment"]
    return (decided or sentence_levels or ["none"])[-1]


@pytest.mark.parametrize(("name", "min_count"), [("speech.txt", 200), ("speech_unseen.txt", 60)])
def test_speech_levels_of_labelled_sentences(name, min_count):
    results = [(label, _level(text), text) for label, text in _labeled(name)]
    assert len(results) >= min_count
    print(
        *(f"{label}, read as {level}: {text}" for label, level, text in results if label != level)
    )
    for expected in ("polite", "plain"):
        correct_predictions = [
            label == expected for label, level, _ in results if level == expected
        ]
        recalled = [level == expected for label, level, _ in results if label == expected]
        precision, recall = (
            sum(correct_predictions) / len(correct_predictions),
            sum(recalled) / len(recalled),
        )
        print(
            f"{name}, {expected}: precision {precision:.3f}, recall {recall:.3f}, n {len(recalled)}"
        )
        assert min(precision, recall) >= AIM
    neither = [(label, level) for label, level, _ in results if label in ("ambiguous", "fragment")]
    assert all(label == level for label, level in neither)


@pytest.mark.parametrize(("name", "min_count"), [("acting.txt", 50), ("acting_unseen.txt", 25)])
def test_who_acts_in_labelled_narrations(name, min_count):
    labeled = list(_labeled(name))
    assert len(labeled) >= min_count
    wrong = [text for label, text in labeled if (label == "acts") != acts(text, "민수", "유나")]
    print(f"{name}: {len(labeled) - len(wrong)} of {len(labeled)} right", *wrong)
    assert len(wrong) <= 0.05 * len(labeled)


@pytest.mark.parametrize(
    ("name", "text", "acting"),
    [
        ("민준", "민준이가 웃었다.", True),  # a final consonant
        ("민준", "민준이는 웃었다.", True),
        ("민준", "민준을 보며 유나가 웃었다.", False),
        ("하늘", "하늘이 고개를 숙였다.", True),  # a noun
        ("하늘", "하늘색 옷이 예뻤다.", False),
        ("하늘", "하늘은 하늘색 옷을 입었다.", True),
        ("민", "민들레가 피었다.", False),  # the beginning of a word
        ("유", "유나는 웃었다.", False),
        ("김민수", "민수가 웃었다.", True),  # the given name
        ("민수", "김민수가 웃었다.", True),
        ("Alex", "Alex는 웃었다.", True),
        ("Alex", "ALEX가 웃었다.", True),
        ("Alex", "Alexandra는 웃었다.", False),
        ("サクラ", "サクラ가 웃었다.", True),
        ("Mary Jane", "Mary  Jane은 웃었다.", True),
        ("지수", "한지수가 웃었다.", False),  # the character's own name
        ("  ", "민수가 웃었다.", False),
        ("", "민수가 웃었다.", False),
        (".*", "민수가 웃었다.", False),
    ],
)
def test_names_are_whole_words(name, text, acting):
    assert acts(text, name, "한지수") is acting
    assert has_particle(text, name, "한지수") is (acting or text.startswith("민준을"))


def test_a_player_with_the_name_of_the_character_is_not_looked_for():
    assert not acts("유나는 웃었다.", "유나", "유나")
    assert not has_particle("유나는 웃었다.", "유나", "유나")
    assert find_name("유나는 웃었다.", "유나", "유나")


@pytest.mark.parametrize(
    "text", ["어디 가?", "밥은 먹었니", "같이 갈까", "누구십니까", "왜 우나요", "그게 뭔데？"]
)
def test_what_asks(text):
    assert asks(text)


@pytest.mark.parametrize("text", ["나는 집에 가.", "좋아요!", "비가 오니까 가.", "", "……"])
def test_what_does_not_ask(text):
    assert not asks(text)


def test_any_thread_may_read_and_no_name_changes_how_another_text_is_read():
    text, before = "하늘이 맑다. 오늘은 뭐 해요?", []
    before.append(sentences(text))
    sentences("하늘이 웃었다.", [(0, 2)])
    assert sentences(text) == before[0]
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(sentences(text) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == before * 80
