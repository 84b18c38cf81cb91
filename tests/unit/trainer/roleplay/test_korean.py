"""Check speech levels, player actions and questions on labeled Korean text.

`pytest -rP` prints precision and recall.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from trainer.roleplay.korean.acting import acts, has_particle
from trainer.roleplay.korean.kiwi import sentences
from trainer.roleplay.korean.names import find_name
from trainer.roleplay.korean.questions import asks
from trainer.roleplay.korean.speech import levels

DATA = Path(__file__).parents[3] / "data/roleplay"
DEMO = Path(__file__).parents[4] / "demo/data/roleplay"
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


def _confusions(name):
    """Return the sentences of a file by their label and the level that is read."""
    confusions = defaultdict(list)
    for heading, text in _labeled(name):
        decided = {level for level in levels(text) if level in ("polite", "plain")}
        level = decided.pop() if len(decided) == 1 else "both" if decided else "none"
        confusions[heading.partition(" | ")[0], level].append(text)
    return confusions


@pytest.mark.parametrize("name", ["dialogue.txt", "dialogue_unseen.txt"])
def test_lines_of_dialogue_are_read_at_their_level_or_at_none(name):
    confusions = _confusions(name)
    counts = {pair: len(texts) for pair, texts in confusions.items()}
    print(name, counts)
    allowed = {("polite", "polite"), ("plain", "plain"), ("none", "none")}
    allowed |= {("polite", "none"), ("plain", "none")}
    assert {pair: texts for pair, texts in confusions.items() if pair not in allowed} == {}
    num_sentences = sum(counts.values())
    assert num_sentences == 284
    assert sum(count for (label, level), count in counts.items() if label == level) >= 280


@pytest.mark.parametrize("file", ["train", "heldout", "final_test", "unseen_names"])
def test_each_sentence_of_the_demo_is_read_at_the_level_of_its_row(file):
    for line in (DEMO / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        quote = row["reference"].partition("\n")[2].strip('"')
        names = (row["character_name"], row["player_name"])
        spans = sorted({span for name in names for span in find_name(quote, name)})
        assert set(levels(quote, spans)) == {row["speech_level"]}, quote


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("늦었네.", "plain"),
        ("누구 없나?", "plain"),
        ("그런가?", "plain"),
        ("내가 그랬던가…", "plain"),
        ("이제야 왔구먼.", "plain"),
        ("누구 없나, 얘들아.", "plain"),
        ("가기는 하나, 늦겠지만.", "fragment"),  # 나 connects
        ("비가 오나…", "fragment"),  # it asks, or it connects
        ("자네 왔나?", "ambiguous"),  # 하게체
        ("여보게, 거기 있는가?", "ambiguous"),
        ("친구네.", "fragment"),  # a household, or a predicate
        ("진짜네.", "plain"),
        ("그네.", "fragment"),
        ("뭔가…", "fragment"),
        ("치마.", "fragment"),
        ("높은 이자.", "fragment"),
        ("예쁜 가지.", "fragment"),
        ("아는 척하지 마.", "plain"),
        ("하지마.", "plain"),
        ("벌써 가게?", "plain"),
        ("이리 앉게.", "ambiguous"),
        ("밥은 먹었고?", "plain"),
        ("밥은 먹었고…", "fragment"),
        ("싫으면 말든가.", "plain"),
        ("싫으면 말든가…", "fragment"),
        ("추우니까.", "plain"),
        ("추우니까…", "fragment"),
        ("고맙긴.", "plain"),
        ("하긴.", "fragment"),
        ("그럼!", "plain"),
        ("그럼…", "fragment"),
        ("어.", "plain"),
        ("어?", "fragment"),
        ("얼른 자.", "plain"),
        ("자!", "fragment"),
        ("아니여.", "fragment"),  # 아니야 in some dialects, 아니에요 in chats
        ("앉으십시오.", "polite"),
        ("모르겠습니다만…", "polite"),
        ("함께 가시렵니까?", "polite"),
        ("제가 그랬다뇨?", "polite"),
        ("저들을 굽어살피소서.", "polite"),
        ("벌써 왔습니더.", "polite"),
        ("떠났습디다.", "ambiguous"),
        ("확인했음.", "ambiguous"),
        ("네.", "polite"),
        ("예.", "polite"),
        ("누구네?", "fragment"),
    ],
)
def test_the_level_of_a_sentence(text, level):
    assert levels(text) == [level]


@pytest.mark.parametrize("text", ["그랬어유.", "좋네예.", "'다녀올게.' 그 말만 남겼어요."])
def test_what_kiwi_splits_inside_a_word_or_a_quotation_is_one_sentence(text):
    assert levels(text) == ["polite"]


def test_a_word_that_kiwi_splits_has_no_level_of_its_first_half():
    assert levels("어디 가십니꺼?") != ["plain"]
    assert len(levels("어디 가십니꺼?")) == 1


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Kiwi reads 데 as a place after 없는 and 재미있는, whether a space is there or not.
        ("그럴 리가 없는데.", ["plain"]),
        ("재미있는데!", ["plain"]),
        ("돈이 없는데, 어쩌지.", ["plain"]),
        ("돈이 없는데요.", ["polite"]),
        ("사람 없는 데.", ["fragment"]),
        ("돈이 없는데, 어쩌죠.", ["polite"]),
        ("이보게, 어디 가나?", ["ambiguous"]),
    ],
)
def test_endings_that_kiwi_takes_for_other_words(text, expected):
    assert levels(text) == expected
