"""Plants words of other scripts, and what broken programs leave, into true translations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from bench.common import ROOT
from scorekit.text.rules import Pair
from scorekit.text.writing_scripts import LETTERS, scripts_of

FOLDER = ROOT / "tests/data/everyday"
#: As for chatter: the rules were made with the first half; the second was read at the end.
HALVES = ("work", "unseen")
#: Words of a script, as models write them into sentences of another language.
WORDS = {
    script: words.split()
    for script, words in (
        ("Han", "非常 措施 天气 问题 随着 環境 重要 但是 经济 現在"),
        ("Kana", "とても それは データ について すぐに"),
        ("Hangul", "매우 정원 그리고 부장님 문제가"),
        ("Cyrillic", "дождь очень пекарня завтра проблема"),
        ("Arabic", "دقائق جدا المشكلة غدا"),
        ("Thai", "มาก วันนี้ ปัญหา"),
        ("Devanagari", "बहुत आज समस्या"),
        ("Hebrew", "מאוד היום"),
    )
}


def with_third_script(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs with one word of a script that neither language has, before a random word
    or in its place."""
    rng = random.Random(0)
    planted = []
    for pair in pairs:
        pair_scripts = {*scripts_of(pair.source_lang), *scripts_of(pair.target_lang)}
        other_scripts = [
            name
            for name in WORDS
            if name not in pair_scripts and not LETTERS[name].search(pair.src)
        ]
        word = rng.choice(WORDS[rng.choice(other_scripts)])
        planted.append(_with_word(pair, word, rng))
    return planted


def with_source_script(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs with a piece of the source left in them; only those whose source has a
    script that the target does not have."""
    rng = random.Random(0)
    planted = []
    for pair in pairs:
        foreign = set(scripts_of(pair.source_lang)) - {*scripts_of(pair.target_lang), "Latin"}
        runs = [
            run for run in pair.src.split() if any(LETTERS[name].match(run) for name in foreign)
        ]
        if runs:
            planted.append(_with_word(pair, rng.choice(runs)[:4], rng))
    return planted


def _with_word(pair: Pair, word: str, rng: random.Random) -> Pair:
    words = pair.mt.split(" ")
    index = rng.randrange(len(words))
    words[index : index + rng.randint(0, 1)] = [word]
    return Pair(pair.src, " ".join(words), pair.source_lang, pair.target_lang)


def with_debris(pairs: Sequence[Pair], kind: str) -> list[Pair]:
    """Return the pairs with one kind of `DEBRIS`; only those that it changes."""
    rng = random.Random(0)
    changed = (
        Pair(pair.src, DEBRIS[kind](pair.mt, rng), pair.source_lang, pair.target_lang)
        for pair in pairs
    )
    return [new for new, pair in zip(changed, pairs, strict=True) if new.mt != pair.mt]


def _lost_character(mt: str, rng: random.Random) -> str:
    index = rng.randrange(len(mt))
    return f"{mt[:index]}\ufffd{mt[index + 1 :]}"


def _wrong_encoding(mt: str, rng: random.Random) -> str:
    return mt.encode().decode("cp1252", "ignore") if not mt.isascii() else mt


def _loose_letter(mt: str, rng: random.Random) -> str:
    indices = [i + 1 for i, char in enumerate(mt) if "가" <= char <= "힣"]
    if not indices:
        return mt
    index = rng.choice(indices)
    return f"{mt[:index]}{rng.choice('ㅏㅣㄴㅅㄱㅔ')}{mt[index:]}"


DEBRIS: dict[str, Callable[[str, random.Random], str]] = {
    "a lost character": _lost_character,
    "a wrong encoding": _wrong_encoding,
    "a loose Korean letter": _loose_letter,
    "an entity": lambda mt, rng: mt.replace(" ", " &amp; ", 1),
    "an escaped line break": lambda mt, rng: mt + r"\n",
}


def everyday(half: str) -> Iterator[Pair]:
    """Yield true pairs of short everyday English: greetings, names, food, headlines, signs."""
    for line in (FOLDER / f"{half}.txt").read_text(encoding="utf-8").splitlines():
        _, language, src, mt = line.split("\t")
        yield Pair(src, mt, language, "en")


def everyday_others() -> Iterator[Pair]:
    """Yield pairs whose everyday translation is in another language than English."""
    for line in (FOLDER / "other.txt").read_text(encoding="utf-8").splitlines():
        _, language, src, mt = line.split("\t")
        yield Pair(src, mt, language, "en")
